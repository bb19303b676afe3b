"""astraflow.dataflow.v1: how members join, take tasks and batches, and settle them."""

from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration

from astraflow.core.batches import AckBatch, BatchPart, StreamBatches
from astraflow.core.members import (
    JoinPool,
    PoolMembership,
    RegisterTrainer,
    ServedPolicy,
    TrainerRegistration,
)
from astraflow.core.rollouts import ItemAck
from astraflow.core.tasks import TaskCancellation, TaskCredit
from astraflow.core.versions import WeightEndpoint
from astraflow.wire.converters import FieldRule, converter, least, step_count
from astraflow.wire.fields import (
    decode_span,
    encode_span,
    invalid,
    message_field,
    required,
    tag_of,
)
from astraflow.wire.rollout import batch_part_pieces
from astraflow_proto.dataflow.v1 import raas_service_pb2, trainer_service_pb2
from astraflow_proto.weights.v1 import version_pb2

converter(
    ServedPolicy,
    raas_service_pb2.ServedPolicy,
    policy_id=required,
    max_context_token_count=least(1),
)


def _must_serve(join: JoinPool) -> None:
    if not join.policies:
        raise invalid("policies", "a RaaS serves at least one")


encode_join_pool, decode_join_pool = converter(
    JoinPool,
    raas_service_pb2.JoinPoolRequest,
    without={"relay_lanes"},
    check=_must_serve,
    name=required,
    capacity=least(1),
)

encode_pool_membership, decode_pool_membership = converter(
    # What is in the store is a matter of members, not of the run.
    PoolMembership,
    raas_service_pb2.JoinPoolResponse,
    without={"payload_store"},
)

encode_task_credit, decode_task_credit = converter(
    TaskCredit,
    raas_service_pb2.TaskCredit,
    without={"member_id"},
    max_outstanding=least(0),
    max_eval_outstanding=least(0),
    max_eval_extra=least(0),
)

encode_task_cancellation, decode_task_cancellation = converter(
    TaskCancellation, raas_service_pb2.TaskCancellation, task_id=required
)

encode_item_ack, decode_item_ack = converter(ItemAck, raas_service_pb2.ItemAck, item_id=required)

converter(
    WeightEndpoint,
    version_pb2.WeightEndpoint,
    without={"ranges"},
    rank=least(0),
    endpoint=required,
)

# Rows are shared out over all ranks at once, and each is listed as a source of weights.
_MOST_RANKS: Final = 1 << 16

encode_register_trainer, decode_register_trainer = converter(
    RegisterTrainer,
    trainer_service_pb2.RegisterTrainerRequest,
    policy_id=required,
    groups_per_batch=least(1),
    last_step=step_count,
    weight_endpoints=FieldRule(most=_MOST_RANKS),
)

encode_trainer_registration, decode_trainer_registration = converter(
    TrainerRegistration, trainer_service_pb2.RegisterTrainerResponse
)


def _must_be_of_world(stream: StreamBatches) -> None:
    if not 0 <= stream.rank < stream.world_size:
        raise invalid("rank", f"{stream.rank} is none of {stream.world_size}")
    if stream.world_size > _MOST_RANKS:
        raise invalid("world_size", f"{stream.world_size} ranks are more than {_MOST_RANKS}")


encode_stream_batches, decode_stream_batches = converter(
    StreamBatches,
    trainer_service_pb2.StreamBatchesRequest,
    # How parts are sent is no matter of the run.
    without={"member_id", "sources"},
    check=_must_be_of_world,
    max_tokens=least(0),
    max_outstanding=least(1),
)


def _encode_seconds(seconds: float) -> Duration | None:
    return encode_span(timedelta(seconds=seconds)) if seconds else None


def _decode_seconds(duration: Duration) -> float:
    # A clock that was set back meanwhile has measured nothing.
    return max(0.0, decode_span(duration).total_seconds())


encode_ack_batch, decode_ack_batch = converter(
    AckBatch,
    trainer_service_pb2.AckBatchRequest,
    without={"member_id"},
    batch_id=required,
    step=step_count,
    wait_s=FieldRule(name="wait_duration", encode=_encode_seconds, decode=_decode_seconds),
    train_s=FieldRule(name="train_duration", encode=_encode_seconds, decode=_decode_seconds),
)


_PART_TAG = tag_of(trainer_service_pb2.StreamBatchesResponse, "part")


def write_batch_part(part: BatchPart) -> bytes:
    """Return a serialized StreamBatchesResponse with a part of a batch."""
    return b"".join(message_field(_PART_TAG, batch_part_pieces(part)))
