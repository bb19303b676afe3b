"""Recipes of several turns, as `astraflow check` looks at them."""

from pathlib import Path

import pytest

from astraflow.launch.check import check_recipe

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
