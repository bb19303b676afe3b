import subprocess
import sys
from pathlib import Path

import yaml
from pydantic import BaseModel

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.trainers.demonstrations import read_demonstrations

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_recipe_docs.py"


def test_the_reference_is_what_the_schema_says():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], check=False)
    assert done.returncode == 0, "docs/recipes.md is stale: run scripts/make_recipe_docs.py"


def keys_below(model):
    for name, field in model.model_fields.items():
        yield name
        for part in parts_of(field.annotation):
            yield from keys_below(part)


def parts_of(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from parts_of(argument)


def test_every_key_is_told(page):
    missing = [key for key in keys_below(Recipe) if f"| `{key}` |" not in page("recipes.md")]
    assert missing == []


def test_recipes_and_demonstrations_of_the_models_page_can_be_read(blocks, tmp_path):
    shown = blocks("models.md")
    [code] = [code for _, title, code in shown if title == "recipe.yaml"]
    (tmp_path / "recipe.yaml").write_text(code)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    warm_up = recipe.policies["player"].model.warm_up
    assert warm_up.demonstrations == tmp_path / "demos.jsonl"
    [rows] = [code for kind, _, code in shown if kind == "json"]
    warm_up.demonstrations.write_text(rows)
    assert len(read_demonstrations(warm_up.demonstrations)) == 2
    others = [yaml.safe_load(code) for kind, title, code in shown if kind == "yaml" and not title]
    for part in others:
        data = part.get("data", {"train": {"path": "a"}})
        model = part.get("model", {"name": "a"})
        whole = {**recipe.model_dump(mode="json"), "data": data}
        whole["policies"] = {"player": {"model": model}}
        Recipe.model_validate(whole)
    assert len(others) == 2


def test_the_recipe_that_is_shown_can_be_read(blocks, tmp_path):
    [code] = [code for _, title, code in blocks("recipes.md") if title == "recipe.yaml"]
    (tmp_path / "recipe.yaml").write_text(code)
    overrides = ["policies.model.trainer.step_count=20"]
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    assert recipe.policies["model"].trainer.step_count == 20
