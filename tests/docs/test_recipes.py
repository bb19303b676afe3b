from collections.abc import Callable, Iterator
from inspect import isclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from astraflow.config.keys import find_keys, key_tables
from astraflow.config.loader import json_schema, load_recipe
from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError
from astraflow.trainers.demonstrations import read_demonstrations

DOCS = Path(__file__).parents[2] / "docs"

Page = Callable[[str], str]
Blocks = Callable[[str], list[tuple[str, str, str]]]


def keys_below(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for part in parts_of(field.annotation):
            yield from keys_below(part)


def parts_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from parts_of(argument)


def test_every_key_is_told(page: Page) -> None:
    told = page("reference/recipe.md")
    assert [key for key in keys_below(Recipe) if f"| `{key}` |" not in told] == []


def test_every_key_has_words() -> None:
    tables = tuple(key_tables(json_schema()))
    assert [f"{each.path}.{row.key}" for each in tables for row in each.rows if not row.words] == []


def test_keys_are_found_by_their_place_in_a_recipe() -> None:
    tables = tuple(key_tables(json_schema()))
    assert find_keys(tables, "policies.solver.trainer").path == "policies.NAME.trainer"
    (row,) = find_keys(tables, "evals.held_out.data_sets.3.repeats").rows
    assert (row.key, row.default) == ("repeats", "1")
    with pytest.raises(AstraflowError, match=r"did you mean policies\.NAME\.trainer\.step_count"):
        find_keys(tables, "policies.solver.trainer.steps_count")


def test_recipes_and_demonstrations_of_the_models_page_can_be_read(
    blocks: Blocks, tmp_path: Path
) -> None:
    shown = blocks("models.md")
    [code] = [code for _, title, code in shown if title == "recipe.yaml"]
    (tmp_path / "recipe.yaml").write_text(code)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    warm_up = recipe.policies["player"].model.warm_up
    assert warm_up is not None
    demonstrations = warm_up.demonstrations
    assert demonstrations is not None
    assert demonstrations == tmp_path / "demos.jsonl"
    [rows] = [code for kind, _, code in shown if kind == "json"]
    demonstrations.write_text(rows)
    assert len(read_demonstrations(demonstrations)) == 2
