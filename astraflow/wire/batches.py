"""astraflow.rollout.v1: batches."""

from typing import Any

from astraflow.core.batches import BatchGroup, BatchHeader, BatchPart, EndCause, EndOfData
from astraflow.core.dtype import Dtype
from astraflow.core.ids import BatchId, GroupId, PolicyId, PromptId, RolloutId, TrajectoryId
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import at_least, decode_vector, fill_tensor, invalid, required
from astraflow.wire.rollout import decode_columns, fill_columns
from astraflow_proto.rollout.v1 import batch_pb2

END_CAUSES = EnumTable(EndCause, batch_pb2.EndCause, "END_CAUSE")


def encode_batch_header(header: BatchHeader) -> batch_pb2.BatchHeader:
    """Return a BatchHeader for the wire."""
    fields: dict[str, Any] = {
        name: getattr(header, name) for name in BatchHeader.__slots__ if name != "groups"
    }
    return batch_pb2.BatchHeader(groups=map(_encode_group, header.groups), **fields)


def _encode_group(group: BatchGroup) -> batch_pb2.BatchGroup:
    return batch_pb2.BatchGroup(**{name: getattr(group, name) for name in BatchGroup.__slots__})


def decode_batch_header(message: batch_pb2.BatchHeader) -> BatchHeader:
    """Read a BatchHeader.

    Raises:
        AstraflowError: INVALID_FIELD when ids are missing or a rank is none of the world's.
    """
    if not 0 <= message.rank < message.world_size:
        raise invalid("rank", f"{message.rank} is none of {message.world_size}")
    return BatchHeader(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=message.version,
        rank=message.rank,
        world_size=message.world_size,
        part_count=at_least(message.part_count, 0, "part_count"),
        row_count=message.row_count,
        token_count=message.token_count,
        loss_token_count=message.loss_token_count,
        groups=tuple(map(_decode_group, message.groups)),
        policy_ids=tuple(map(PolicyId, message.policy_ids)),
        delivery_count=at_least(message.delivery_count, 1, "delivery_count"),
        metrics=dict(message.metrics),
    )


def _decode_group(message: batch_pb2.BatchGroup) -> BatchGroup:
    return BatchGroup(
        group_id=GroupId(message.group_id),
        prompt_id=PromptId(message.prompt_id),
        data_set=message.data_set,
        epoch=message.epoch,
        sample_count=message.sample_count,
        traceparent=message.traceparent,
    )


def encode_batch_part(part: BatchPart) -> batch_pb2.BatchPart:
    """Return a BatchPart for the wire."""
    message = batch_pb2.BatchPart()
    fill_batch_part(message, part)
    return message


def fill_batch_part(message: batch_pb2.BatchPart, part: BatchPart) -> None:
    """Fill an empty BatchPart in place: megabytes are not copied from message to message."""
    message.batch_id = part.batch_id
    message.index = part.index
    fill_tensor(message.row_offsets, part.row_offsets)
    message.trajectory_ids.extend(part.trajectory_ids)
    message.rollout_ids.extend(part.rollout_ids)
    fill_columns(message.columns, part.columns)


def decode_batch_part(message: batch_pb2.BatchPart) -> BatchPart:
    """Read a BatchPart.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return BatchPart(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        index=at_least(message.index, 0, "index"),
        row_offsets=decode_vector(message.row_offsets, Dtype.I64, "row_offsets"),
        trajectory_ids=tuple(map(TrajectoryId, message.trajectory_ids)),
        rollout_ids=tuple(map(RolloutId, message.rollout_ids)),
        columns=decode_columns(message.columns),
    )


def encode_end_of_data(end: EndOfData) -> batch_pb2.EndOfData:
    """Return an EndOfData for the wire."""
    return batch_pb2.EndOfData(cause=END_CAUSES.encode(end.cause), batch_count=end.batch_count)


def decode_end_of_data(message: batch_pb2.EndOfData) -> EndOfData:
    """Read an EndOfData.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown cause.
    """
    return EndOfData(cause=END_CAUSES.decode(message.cause), batch_count=message.batch_count)
