import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from astraflow.core.batches import StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.dataflow import (
    decode_ack_batch,
    decode_stream_batches,
    encode_stream_batches,
)
from astraflow.wire.fields import encode_tensor
from astraflow.wire.rollout import decode_batch_part
from astraflow_proto.dataflow.v1 import trainer_service_pb2
from astraflow_proto.rollout.v1 import batch_pb2


def test_a_part_whose_offsets_do_not_rise_is_refused():
    offsets = encode_tensor(np.array([0, 2, 2]))
    part = batch_pb2.BatchPart(
        batch_id="b1", row_offsets=offsets, trajectory_ids="ab", rollout_ids="ab"
    )

    with pytest.raises(AstraflowError, match=f"{Reason.INVALID_FIELD}: .*must rise"):
        decode_batch_part(part)


@pytest.mark.parametrize("world", [(0, 2**31 - 1), (4, 4), (-1, 4)])
def test_a_rank_is_one_of_as_many_as_there_can_be(world):
    rank, world_size = world
    stream = encode_stream_batches(StreamBatches(rank=rank, world_size=world_size))

    with pytest.raises(AstraflowError, match=rf"{Reason.INVALID_FIELD}: (rank|world_size)"):
        decode_stream_batches(stream)


@pytest.mark.parametrize("step", [-1, 2**63 - 1])
def test_an_ack_of_steps_that_cannot_be_added_to_is_refused(step):
    """The next step was none that a status can say."""
    message = trainer_service_pb2.AckBatchRequest(
        batch_id="b", outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED, step=step
    )
    with pytest.raises(AstraflowError, match=f"step: {step} is no number of steps"):
        decode_ack_batch(message)


def test_a_clock_that_was_set_back_has_measured_nothing():
    back = Duration(seconds=-5)
    message = trainer_service_pb2.AckBatchRequest(
        batch_id="b",
        outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED,
        wait_duration=back,
        train_duration=back,
    )
    ack = decode_ack_batch(message)
    assert (ack.wait_s, ack.train_s) == (0, 0)
