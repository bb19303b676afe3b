"""The page on algorithms of training: what it shows can be put in a recipe."""

import re

import yaml

from astraflow.config.recipe import Advantages, CriticConfig, Loss

SECTIONS = {"loss": Loss, "advantages": Advantages, "critic": CriticConfig}


def test_every_row_can_be_put_in_a_recipe(page):
    shown = re.findall(r"`((?:loss|advantages|critic): \{.*?\})`", page("losses.md"))
    assert len(shown) >= len(SECTIONS) + 18
    for each in shown:
        [(section, keys)] = yaml.safe_load(each).items()
        SECTIONS[section].model_validate(keys)
