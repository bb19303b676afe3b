"""The page on algorithms of training: what it shows can be put in a recipe."""

import re

import numpy as np
import yaml

from astraflow.config.recipe import Advantages, CriticConfig, Loss, Optimizer, TrainerConfig
from astraflow.core.algorithms.advantages import estimator_of
from astraflow.trainers.losses import try_own_code
from astraflow.trainers.optimizer import try_own_optimizer

SECTIONS = {
    "loss": Loss,
    "advantages": Advantages,
    "critic": CriticConfig,
    "optimizer": Optimizer,
}


def test_every_row_can_be_put_in_a_recipe(page):
    shown = re.findall(r"`((?:loss|advantages|critic|optimizer): \{.*?\})`", page("losses.md"))
    assert len(shown) >= len(SECTIONS) + 18
    for each in shown:
        [(section, keys)] = yaml.safe_load(each).items()
        SECTIONS[section].model_validate(keys)


def test_code_of_ones_own_is_named_in_a_line_and_works(blocks, tmp_path, monkeypatch):
    shown = {title: code for _, title, code in blocks("own-losses.md") if title}
    (tmp_path / "my_rl.py").write_text(shown["my_rl.py"])
    monkeypatch.syspath_prepend(tmp_path)
    [recipe] = [
        code for kind, _, code in blocks("own-losses.md") if kind == "yaml" and "my_rl" in code
    ]
    fields = yaml.safe_load(recipe)["policies"]["solver"]["trainer"]
    trainer = TrainerConfig.model_validate(fields)
    try_own_code(trainer.loss)
    try_own_optimizer(trainer.optimizer)
    best = estimator_of(trainer.advantages.estimator)(np.array([0.0, 1.0, 0.0, 1.0]))
    assert best.tolist() == [-0.5, 0.5, -0.5, 0.5]
