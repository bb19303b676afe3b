"""Orders that have ended, as a Dataflow reads them."""

import numpy as np
import pytest

from astraflow.core.errors import Failure, Reason
from astraflow.core.rollouts import FinishReason, Outcome, Rollout, Trajectory, VersionSpan
from astraflow.core.tasks import Prompt, RolloutTask, SamplingParams, TaskPurpose
from astraflow.gateway.pool.orders import Order
from astraflow.gateway.pool.results import item_of, model_index

LABELS = {"model0": {7: 3, 8: 5}, "model1": {7: 0}}
POLICIES = ("model0", "model1")


def order(count=2):
    return Order(
        number=4,
        max_attempts=2,
        pattern=RolloutTask(
            task_id="g",
            group_id="g",
            purpose=TaskPurpose.TRAIN,
            workflow_id="main",
            prompt=Prompt(prompt_id="p", data_set="d", fields={"query_id": "q", "x": 1}),
            sample_indexes=tuple(range(count)),
            versions={},
            sampling={"model0": SamplingParams()},
        ),
    )


def trajectory(policy_id, *spans):
    length = sum(length for _, length in spans)
    sampled = np.array([False] + [True] * length)
    return Trajectory(
        trajectory_id=f"t-{policy_id}",
        policy_id=policy_id,
        tokens=np.arange(length + 1, dtype=np.int32),
        sampled_mask=sampled,
        logprobs=-sampled.astype(np.float32),
        version_spans=tuple(VersionSpan(version=v, length=n) for v, n in spans),
        finish_reason=FinishReason.STOP,
    )


def rollout(task_id, index, **changes):
    known = {
        "rollout_id": f"r{index}",
        "task_id": task_id,
        "group_id": "g",
        "sample_index": index,
        "outcome": Outcome.SCORED,
        "reward": 0.5,
        "trajectories": (trajectory("model0", (7, 2), (8, 1)), trajectory("model1", (7, 1))),
        "metrics": {"turns": 2.0 + index},
    }
    return Rollout(**(known | changes))


def test_a_result_has_every_policys_tokens_under_the_trainers_own_versions():
    asked = order(1)
    task = asked.issue(8, {})
    assert asked.take(rollout(task.task_id, 0))
    asked.close(task.task_id)
    item = item_of(asked, LABELS, POLICIES)
    result = item["result"]
    first, second = result["trajectories"][0]["sequences"]
    assert (item["task_id"], result["query_id"], result["n_trajs"]) == (4, "q", 1)
    assert first["versions"].tolist() == [[-1, 3, 3, 5]]
    assert second["versions"].tolist() == [[-1, 0]]
    assert (first["model_ids"].tolist(), second["model_ids"].tolist()) == (
        [[-1, 0, 0, 0]],
        [[-1, 1]],
    )
    assert result["agent_metrics"] == {"turns": 2.0}


def test_a_sample_that_fails_is_tried_again_and_left_out():
    asked, lost = order(2), Failure(reason=Reason.ENGINE_FAILED, message="it died")
    first = asked.issue(2, {})
    asked.take(rollout(first.task_id, 1))
    asked.close(first.task_id, (lost,))
    again = asked.issue(2, {})
    assert (again.sample_indexes, again.attempt) == ((0,), 1)
    assert again.task_id != first.task_id
    asked.close(again.task_id, (lost,))
    assert asked.is_over
    assert item_of(asked, LABELS, POLICIES)["result"]["n_trajs"] == 1


def test_no_failure_is_a_reward_of_nought():
    asked = order(1)
    for _ in range(2):
        task = asked.issue(1, {})
        failure = Failure(reason=Reason.SCORER_FAILED, message="no scorer")
        failed = {"outcome": Outcome.SCORER_FAILED, "reward": None, "failure": failure}
        asked.take(rollout(task.task_id, 0, **failed))
        asked.close(task.task_id)
    item = item_of(asked, LABELS, POLICIES)
    assert item["result"]["ok"] is False
    assert "no scorer" in item["result"]["error"]


@pytest.mark.parametrize(
    ("policy_id", "policies", "number"),
    [("model3", ("model3",), 3), ("solver", ("asks", "solver"), 1)],
)
def test_models_are_counted_as_they_are_named(policy_id, policies, number):
    assert model_index(policy_id, policies) == number
