"""Orders that have ended, as a Dataflow reads them."""

import pytest

from astraflow.core.rollouts import VersionSpan
from astraflow.gateway.raas.orders import Order, item_of
from astraflow.gateway.settings import model_index
from made_up import made_up_rollout, made_up_task, made_up_trajectory

LABELS = {"model0": {7: 3, 8: 5}, "model1": {7: 0}}
POLICIES = ("model0", "model1")


def order(count=2):
    return Order(
        number=4,
        task=made_up_task(
            {"query_id": "q", "x": 1}, task_id="g", sample_indexes=tuple(range(count))
        ),
    )


def trajectory(policy_id, *spans):
    spans = [VersionSpan(version=version, length=length) for version, length in spans]
    return made_up_trajectory(f"t-{policy_id}", policy_id, spans)


def rollout(task_id, index, **changes):
    known = {
        "rollout_id": f"r{index}",
        "task_id": task_id,
        "sample_index": index,
        "reward": 0.5,
        "metrics": {"turns": 2.0 + index},
    }
    rows = (trajectory("model0", (7, 2), (8, 1)), trajectory("model1", (7, 1)))
    return made_up_rollout(*rows, **(known | changes))


def test_a_result_has_every_policys_tokens_under_the_trainers_own_versions():
    asked = order(1)
    asked.rollouts[0] = rollout("g", 0)
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


@pytest.mark.parametrize(
    ("policy_id", "policies", "number"),
    [("model3", ("model3",), 3), ("solver", ("asks", "solver"), 1)],
)
def test_models_are_counted_as_they_are_named(policy_id, policies, number):
    assert model_index(policy_id, policies) == number
