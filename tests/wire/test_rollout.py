import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, Outcome, Rollout, Trajectory, VersionSpan
from astraflow.core.tasks import (
    Prompt,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
)
from astraflow.wire.fields import encode_tensor
from astraflow.wire.rollout import (
    decode_batch_part,
    decode_rollout,
    decode_rollout_task,
    decode_sampling,
    encode_rollout,
    encode_rollout_task,
    encode_sampling,
)
from astraflow_proto.rollout.v1 import batch_pb2, rollout_pb2, sampling_pb2


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


class TestTask:
    @pytest.fixture
    def task(self):
        return encode_rollout_task(
            RolloutTask(
                task_id="k1",
                group_id="g1",
                purpose=TaskPurpose.TRAIN,
                workflow_id="w1",
                prompt=Prompt(prompt_id="p1", data_set="train", fields={"prompt": "x"}),
                sample_indexes=(0, 1),
                versions={"solver": VersionRange(min=2)},
                sampling={},
            )
        )

    def test_a_version_of_0_is_not_any_version(self, task):
        task.versions["solver"].min = 0

        assert decode_rollout_task(task).versions["solver"] == VersionRange(min=0)

    @pytest.mark.parametrize("indexes", [[], [-1], [2, 2]])
    def test_samples_are_named_once_each(self, task, indexes):
        task.sample_indexes[:] = indexes

        with refused(Reason.INVALID_FIELD, "sample_indexes"):
            decode_rollout_task(task)

    def test_training_names_no_evaluation(self, task):
        task.eval_run_id = "e1"

        with refused(Reason.INVALID_FIELD, "eval_run_id"):
            decode_rollout_task(task)

    def test_versions_must_not_be_the_wrong_way_round(self, task):
        task.versions["solver"].max = 1

        with refused(Reason.INVALID_FIELD, "versions"):
            decode_rollout_task(task)


class TestSampling:
    def test_defaults_stay_unset(self):
        assert encode_sampling(SamplingParams()).ByteSize() == 0

    def test_greedy_is_not_the_default(self):
        assert decode_sampling(encode_sampling(SamplingParams(temperature=0))).temperature == 0

    @pytest.mark.parametrize(
        "knob",
        [
            {"temperature": -1},
            {"temperature": float("nan")},
            {"top_p": 0},
            {"top_p": 1.5},
            {"top_k": 0},
            {"min_p": 1},
            {"repetition_penalty": 0},
            {"max_new_tokens": -1},
        ],
    )
    def test_knobs_out_of_range_are_refused(self, knob):
        with refused(Reason.INVALID_FIELD, next(iter(knob))):
            decode_sampling(sampling_pb2.SamplingParams(**knob))


def test_a_part_whose_offsets_do_not_rise_is_refused():
    offsets = encode_tensor(np.array([0, 2, 2]))
    part = batch_pb2.BatchPart(
        batch_id="b1", row_offsets=offsets, trajectory_ids="ab", rollout_ids="ab"
    )

    with refused(Reason.INVALID_FIELD, "must rise"):
        decode_batch_part(part)
