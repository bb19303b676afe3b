import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe

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


def test_the_recipe_that_is_shown_can_be_read(blocks, tmp_path):
    [code] = [code for _, title, code in blocks("recipes.md") if title == "recipe.yaml"]
    (tmp_path / "recipe.yaml").write_text(code)
    overrides = ["policies.model.trainer.step_count=20"]
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    assert recipe.policies["model"].trainer.step_count == 20
