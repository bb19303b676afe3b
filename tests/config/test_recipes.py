"""The recipes in the repository mean what the documents say of them."""

from difflib import ndiff
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


def test_three_algorithms_are_a_change_of_ten_lines():
    texts = [(FOLDER / f"{name}.yaml").read_text() for name in ("sort", "sort-algorithms")]
    lines = [[line for line in text.splitlines() if "#" not in line] for text in texts]
    changed = [line for line in ndiff(*lines) if line[0] == "+" and "name:" not in line]
    assert len(changed) <= 10
    settings = recipe("sort-algorithms")
    assert [each.name for each in settings.rollouts.selectors] == ["greso"]
    assert [each.name for each in settings.rollouts.filters] == ["zero_advantage"]
    assert settings.policies["solver"].trainer.replay.ratio == 0.3


@pytest.mark.parametrize("name", ["sort", "sort-algorithms", "sort-retry", "sort-pair"])
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
