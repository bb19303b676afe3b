import importlib.util
from pathlib import Path

import pytest
import yaml

from astraflow.core.algorithms import finding
from astraflow.core.settings import PlugInSpec

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_algorithm_and_its_options_are_told(page):
    text = page("algorithms.md")
    for point in finding.Point:
        for name in finding.names(point):
            assert f"`{name}`" in text
            for option in finding.find(point, name).__dataclass_fields__.values():
                assert not option.init or f"`{option.name}`" in text


def test_the_composition_that_is_shown_is_that_of_the_recipe(blocks):
    shown = yaml.safe_load(
        next(code for kind, _, code in blocks("algorithms.md") if kind == "yaml")
    )
    recipe = yaml.safe_load((RECIPES / "sort-algorithms.yaml").read_text())
    assert shown["rollouts"].items() <= recipe["rollouts"].items()
    trainer = recipe["policies"]["solver"]["trainer"]
    assert shown["policies"]["solver"]["trainer"].items() <= trainer.items()


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (finding.Point.SELECTOR, "Coin"),
        (finding.Point.FILTER, "NotTooLong"),
        (finding.Point.ORDER, "Hardest"),
        (finding.Point.GUARD, "NotTooOld"),
    ],
)
def test_the_template_has_an_algorithm_for_every_point(monkeypatch, point, name):
    monkeypatch.syspath_prepend(RECIPES)
    assert importlib.util.find_spec("algorithms_template")
    spec = PlugInSpec(name=f"algorithms_template:{name}")
    assert finding.make(finding.BASES[point], spec).metrics() is not None
