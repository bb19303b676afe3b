import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import (
    ROUTED_EXPERTS,
    FinishReason,
    Outcome,
    Rollout,
    Trajectory,
    VersionSpan,
)
from astraflow.wire.fields import encode_tensor
from astraflow.wire.rollout import decode_rollout, encode_rollout
from astraflow_proto.rollout.v1 import column_pb2, rollout_pb2


def refused(reason, message):
    return pytest.raises(AstraflowError, match=f"{reason}: .*{message}")


@pytest.fixture
def message() -> rollout_pb2.Rollout:
    trajectory = Trajectory(
        trajectory_id="t1",
        policy_id="solver",
        tokens=np.array([5, 6, 7], np.int32),
        sampled_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], np.float32),
        version_spans=(VersionSpan(version=3, length=2),),
        finish_reason=FinishReason.STOP,
    )
    rollout = Rollout(
        rollout_id="r1",
        task_id="k1",
        group_id="g1",
        sample_index=0,
        outcome=Outcome.SCORED,
        reward=1.0,
        trajectories=(trajectory,),
    )
    return encode_rollout(rollout)


class TestRollout:
    def test_carries_the_oldest_version_of_each_policy(self, message):
        assert dict(message.policy_versions) == {"solver": 3}

    def test_a_reward_of_0_is_a_reward(self, message):
        message.reward = 0.0

        assert decode_rollout(message).reward == 0.0

    def test_no_reward_is_none(self, message):
        message.outcome = rollout_pb2.OUTCOME_TRUNCATED
        message.ClearField("reward")

        assert decode_rollout(message).reward is None

    def test_a_token_without_a_version_is_refused(self, message):
        message.trajectories[0].version_spans[0].length = 1

        with refused(Reason.ROLLOUT_INVALID, "do not cover"):
            decode_rollout(message)

    def test_a_failure_with_a_reward_is_refused(self, message):
        message.outcome = rollout_pb2.OUTCOME_INFRA_ERROR

        with refused(Reason.ROLLOUT_INVALID, "has no reward"):
            decode_rollout(message)

    def test_64_bit_tokens_are_refused(self, message):
        tokens = encode_tensor(np.array([5, 6, 7]))
        message.trajectories[0].tokens.CopyFrom(tokens)

        with refused(Reason.INVALID_FIELD, "tokens"):
            decode_rollout(message)

    @pytest.mark.parametrize("field", ["rollout_id", "task_id", "group_id", "outcome"])
    def test_what_it_needs_must_be_there(self, message, field):
        message.ClearField(field)

        with refused(Reason.INVALID_FIELD, field) as caught:
            decode_rollout(message)

        assert caught.value.metadata == {"field": field}

    @pytest.mark.parametrize(
        ("values", "fault"),
        [
            (np.zeros((2, 1, 2), np.uint16), "one entry per token"),
            (np.zeros((3, 1, 2), np.int32), "u16"),
            (np.zeros((3, 2), np.uint16), "layers, k"),
        ],
    )
    def test_routes_of_another_shape_are_refused(self, message, values, fault):
        column = message.trajectories[0].columns[ROUTED_EXPERTS]
        column.axis = column_pb2.COLUMN_AXIS_TOKEN
        column.tensor.CopyFrom(encode_tensor(values))

        with refused(Reason.ROLLOUT_INVALID, fault):
            decode_rollout(message)
