"""The recipes in the repository mean what the documents say of them."""

from pathlib import Path

import pytest

from astraflow.config.loader import load_recipe
from astraflow.workflows.data_sets import open_data_set

FOLDER = Path(__file__).parents[2] / "recipes"


def recipe(name):
    return load_recipe(FOLDER / f"{name}.yaml")


def test_sort_has_the_measured_settings():
    trainer = recipe("sort").policies["solver"].trainer
    assert (trainer.groups_per_batch, trainer.step_count, trainer.max_staleness) == (16, 120, 2)
    assert recipe("sort").rollouts.group_size == 8
    assert recipe("sort").raas.count == 2


@pytest.mark.parametrize("name", ["sort", "sort-retry", "sort-pair"])
def test_held_out_prompts_are_not_trained_on(name):
    settings = recipe(name).data
    ids = {
        data_set: {
            prompt.prompt_id.partition("/")[2]
            for prompt in open_data_set(data_set, settings[data_set], FOLDER).epoch(0)
        }
        for data_set in ("train", "held_out")
    }
    assert len(ids["held_out"]) == 2048
    assert not ids["train"] & ids["held_out"]


def test_the_pair_trains_two_policies_and_measures_a_vote():
    pair = recipe("sort-pair")
    assert pair.policies_of("pair") == ("solver", "verifier")
    assert pair.workflows[pair.evals["held_out"].data_sets[0].workflow].name == "vote"


def test_the_template_needs_only_a_model_and_prompts():
    template = recipe("template")
    assert template.policies["model"].model.path == Path("/path/to/model")
    assert template.data["train"].path == FOLDER / "prompts.jsonl"
