from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from astraflow.core.algorithms.points import RolloutFilter
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import RunId
from astraflow.core.settings import AdvantageSettings, Baseline
from astraflow.core.tasks import SamplingParams
from astraflow.dataflow.recipe_settings import run_settings


def settings_of(recipe):
    return run_settings(recipe, run_id=RunId("run"), size_of=lambda name: 7)


def test_a_policy_brings_its_training_and_sampling(recipe_of):
    recipe = recipe_of(
        policies__solver__trainer__advantages={
            "scale_by_std": True,
            "std": "population",
            "agents": {"second": {"baseline": "none"}},
        },
        policies__solver__sampling={"temperature": 0.5, "max_new_tokens": 9, "stop_strings": ["."]},
    )
    (policy,) = settings_of(recipe).policies
    assert (policy.groups_per_batch, policy.max_staleness, policy.step_count) == (2, 1, 3)
    assert policy.advantages.scale_by_std
    assert policy.advantages.is_population_std
    assert policy.advantages.agents == {"second": AdvantageSettings(baseline=Baseline.NONE)}
    assert policy.sampling == SamplingParams(
        temperature=0.5, max_new_tokens=9, stop_strings=(".",), seed=None
    )


def test_rollouts_and_times_are_carried_over(recipe_of):
    recipe = recipe_of(rollouts__timeout_s=2.5, rollouts__max_attempts=5, hub__session_ttl_s=4)
    settings = settings_of(recipe)
    assert settings.rollouts.timeout == timedelta(seconds=2.5)
    assert (settings.rollouts.group_size, settings.rollouts.max_attempts) == (2, 5)
    assert settings.session_ttl == timedelta(seconds=4)


def test_workflows_are_named_with_the_digest_of_their_code(recipe_of):
    (workflow,) = settings_of(recipe_of()).workflows
    assert (workflow.workflow_id, workflow.code.name) == ("main", "single_turn")
    assert len(workflow.code.code_digest) == 32
    assert workflow.policy_ids == ("solver",)


def test_a_workflow_that_is_not_here_is_named(recipe_of):
    recipe = recipe_of(workflows={"main": {"name": "no_such_workflow"}})
    with pytest.raises(AstraflowError, match="no_such_workflow") as caught:
        settings_of(recipe)
    assert caught.value.reason is Reason.CODE_UNKNOWN


def test_a_suite_pins_the_policies_of_its_workflows(recipe_of):
    recipe = recipe_of(
        policies=("solver", "verifier"),
        workflows={
            "main": {"name": "single_turn"},
            "one": {"name": "single_turn", "policies": ["verifier"]},
        },
        evals={"held": {"data_sets": [{"data_set": "train", "workflow": "one", "repeats": 3}]}},
    )
    (suite,) = settings_of(recipe).suites
    assert suite.suite.policy_ids == ("verifier",)
    (part,) = suite.suite.data_sets
    assert (part.prompt_count, part.repeats, part.correct_reward) == (7, 3, 1.0)


@dataclass(slots=True, kw_only=True)
class ShortWords(RolloutFilter):
    """Looks at tokens."""

    reads_tokens = True

    def keeps(self, group):
        return [True] * len(group.samples)


def test_an_algorithm_that_reads_tokens_is_refused_beside_a_payload_store(recipe_of, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    filters = [{"name": "zero_advantage"}, {"name": f"{Path(__file__).stem}:ShortWords"}]
    assert not settings_of(recipe_of(rollouts__filters=filters)).takes_payloads
    store = {"url": "file:///shared/payloads"}
    with pytest.raises(AstraflowError, match="ShortWords reads tokens") as caught:
        settings_of(recipe_of(rollouts__filters=filters, rollouts__payloads=store))
    assert caught.value.reason is Reason.INVALID_FIELD
    recipe = recipe_of(rollouts__filters=filters[:1], rollouts__payloads=store)
    assert settings_of(recipe).takes_payloads
