"""Recipes of several turns, as `astraflow check` looks at them."""

from pathlib import Path

import pytest

from astraflow.config.loader import load_recipe
from astraflow.core.tasks import Prompt
from astraflow.launch.check import check_recipe
from astraflow.workflows.prompts import fill

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["search", "tools", "webshop"])
@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_the_recipes_can_be_run(folder, name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "recipes" / folder)
    report = check_recipe(
        ROOT / "recipes" / folder / f"{name}.yaml",
        runs=tmp_path,
        is_elsewhere=name != "cpu",
        limit_s=60.0,
    )
    assert report.errors == []


@pytest.mark.parametrize("name", ["gpu-8", "gpu-2x8"])
def test_the_models_of_math_are_asked_for_a_box(name):
    recipe = load_recipe(ROOT / "recipes" / "math" / f"{name}.yaml", ())
    (message,) = recipe.workflows["solve"].options["messages"]
    prompt = Prompt(prompt_id="p", data_set="train", fields={"problem": "1 + 1"})
    assert fill(message["content"], prompt).endswith(r"your final answer within \boxed{}.")
