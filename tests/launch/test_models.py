"""A run's models: got and made by processes whose words are shown."""

import json

import pytest

from astraflow.config.loader import dump_recipe, load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.launch.models import pinned, prepare_models
from astraflow.launch.processes import LocalExecutor

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b [c]"}]
RECIPE = """
name: small
policies:
  one: {model: {tiny: {hidden_size: 32, layer_count: 1}, warm_up: {demonstrations: demos.jsonl, step_count: 2}}}
  two: {model: {tiny: {hidden_size: 32, layer_count: 1}, warm_up: {demonstrations: demos.jsonl, step_count: 2}}}
data: {train: {path: train.jsonl}}
workflows: {main: {name: single_turn, scorer: exact}}
rollouts: {data_set: train, workflow: main}
"""  # noqa: E501


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Prepares the models of a recipe; returns their directories and what was said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "demos.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()

    async def run(*overrides):
        recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
        run_dir.recipe.write_text(dump_recipe(recipe))
        said = []
        executor = LocalExecutor()
        try:
            return await prepare_models(recipe, run_dir, executor=executor, note=said.append), said
        finally:
            await executor.close()

    return run


@pytest.mark.slow
async def test_policies_of_one_origin_share_a_model_and_its_progress_is_shown(prepare):
    models, said = await prepare()
    assert models["one"] == models["two"]
    assert (models["one"] / "model.safetensors").is_file()
    assert said[0].startswith("one: learning from 1 demonstrations")
    assert said[1].startswith("one: warm-up step 1/2 loss ")
    assert said[-1] == f"one: {models['one']}"


@pytest.mark.slow
async def test_a_model_that_cannot_be_had_says_why(prepare):
    with pytest.raises(ExceptionGroup) as caught:
        await prepare(*(f"policies.{each}.model={{name: smolm2-135m}}" for each in ("one", "two")))
    assert caught.group_contains(AstraflowError, match=r"(?s)model of one.*mean 'smollm2-135m'")


async def test_a_directory_without_a_model_is_refused(prepare, tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        await prepare(f"policies.one.model={{path: {tmp_path}}}")
    assert caught.group_contains(AstraflowError, match=r"policies\.one\.model\.path: .* lacks")


def test_a_recipe_that_names_no_hub_is_left_as_it_is(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert pinned(recipe, note=pytest.fail) == recipe
