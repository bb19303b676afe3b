import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams, VersionRange
from astraflow.wire.tasks import (
    decode_rollout_task,
    decode_sampling,
    encode_rollout_task,
    encode_sampling,
)
from astraflow_proto.rollout.v1 import sampling_pb2
from made_up import made_up_task


def refused(reason, message):
    return pytest.raises(AstraflowError, match=f"{reason}: .*{message}")


class TestTask:
    @pytest.fixture
    def task(self):
        return encode_rollout_task(
            made_up_task(
                {"prompt": "x"}, sample_indexes=(0, 1), versions={"solver": VersionRange(min=2)}
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
            {"temperature": 1e39},
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
