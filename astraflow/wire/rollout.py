"""astraflow.rollout.v1: rollouts, their trajectories, and batches."""

import re
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from astraflow.core.batches import BatchHeader, BatchPart, EndOfData, RowSource
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, GroupId, PolicyId, RolloutId, TaskId, TrajectoryId
from astraflow.core.rollouts import (
    Column,
    ColumnAxis,
    FinishReason,
    KvPolicy,
    Outcome,
    Payload,
    PayloadStore,
    Rollout,
    TaskResult,
    Trajectory,
    VersionSpan,
)
from astraflow.core.tensors import Dtype
from astraflow.wire.converters import FieldRule, converted, converter, least, sized
from astraflow.wire.fields import (
    DTYPES,
    EnumTable,
    at_least,
    decode_tensor,
    decode_vector,
    fill_tensor,
    invalid,
    message_field,
    moment_of,
    required,
    tag_of,
)
from astraflow.wire.tasks import read_sampling, write_sampling
from astraflow_proto.dataflow.v1 import raas_service_pb2
from astraflow_proto.rollout.v1 import (
    batch_pb2,
    column_pb2,
    payload_pb2,
    rollout_pb2,
    trajectory_pb2,
)

if TYPE_CHECKING:
    from astraflow.wire._rollouts import fits, scan, split
else:
    try:
        from astraflow.wire._rollouts import fits, scan, split
    except ImportError:
        fits = scan = split = None

_I32, _BOOL, _F32 = np.dtype("<i4"), np.dtype(np.bool_), np.dtype("<f4")

OUTCOMES = EnumTable(Outcome, rollout_pb2.Outcome, "OUTCOME")
FINISH_REASONS = EnumTable(FinishReason, trajectory_pb2.FinishReason, "FINISH_REASON")

KV_POLICIES = EnumTable(
    KvPolicy, trajectory_pb2.KvPolicy, "KV_POLICY", unspecified=KvPolicy.UNKNOWN
)

COLUMN_AXES = EnumTable(ColumnAxis, column_pb2.ColumnAxis, "COLUMN_AXIS")

# The run removes objects by their names, and readers open them.
_PAYLOAD_NAME = re.compile(r"[a-z0-9-]{1,64}")

_VECTORS = {"tokens": Dtype.I32, "sampled_mask": Dtype.BOOL, "logprobs": Dtype.F32}
# What a trajectory is made with whose arrays lie in the payload store.
_NOTHING = np.empty(0)
_ELSEWHERE: dict[str, Any] = {**dict.fromkeys(_VECTORS, _NOTHING), "columns": {}}


def fill_columns(
    messages: MutableMapping[str, column_pb2.Column], columns: Mapping[str, Column]
) -> None:
    """Fill an empty map of columns."""
    for name, column in columns.items():
        message = messages[name]
        message.axis = COLUMN_AXES.encode(column.axis)
        fill_tensor(message.tensor, column.values)


def decode_columns(messages: Mapping[str, column_pb2.Column]) -> dict[str, Column]:
    return {
        name: Column(
            axis=COLUMN_AXES.decode(column.axis), values=decode_tensor(column.tensor, name)
        )
        for name, column in messages.items()
    }


def _payload_name(name: str, field: str) -> str:
    if not _PAYLOAD_NAME.fullmatch(name):
        raise invalid(field, f"'{name}' is none of 1 to 64 of a-z, 0-9 and -")
    return name


_digest = sized(32)

encode_payload, decode_payload = converter(
    Payload, payload_pb2.Payload, name=_payload_name, digest=_digest, nbytes=least(1)
)

encode_payload_store, decode_payload_store = converter(PayloadStore, payload_pb2.PayloadStore)


def write_arrays(trajectory: Trajectory) -> bytes:
    """Return the object of the payload store that holds the arrays of a trajectory."""
    message = payload_pb2.TrajectoryArrays()
    _fill_arrays(message, trajectory)
    return message.SerializeToString()


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the arrays that an object of the payload store holds, by the trajectory's fields."""
    try:
        message = payload_pb2.TrajectoryArrays.FromString(data)
    except DecodeError as error:
        raise invalid("payload", str(error)) from error
    return _decode_arrays(message)


def _fill_arrays(
    message: payload_pb2.TrajectoryArrays | trajectory_pb2.Trajectory, trajectory: Trajectory
) -> None:
    for name, dtype in _VECTORS.items():
        # A trajectory has them of these types and of one length.
        tensor, values = getattr(message, name), getattr(trajectory, name)
        tensor.dtype, tensor.data = DTYPES.numbers[dtype], values.tobytes()
        tensor.shape.append(len(values))
    if trajectory.columns:
        fill_columns(message.columns, trajectory.columns)


def _decode_arrays(
    message: payload_pb2.TrajectoryArrays | trajectory_pb2.Trajectory,
) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        name: decode_vector(getattr(message, name), dtype, name) for name, dtype in _VECTORS.items()
    }
    arrays["columns"] = decode_columns(message.columns) if message.columns else {}
    return arrays


_encode_version_span, _decode_version_span = converter(VersionSpan, trajectory_pb2.VersionSpan)


def encode_trajectory(trajectory: Trajectory) -> trajectory_pb2.Trajectory:
    message = trajectory_pb2.Trajectory()
    _fill_trajectory(message, trajectory)
    return message


def _fill_trajectory(message: trajectory_pb2.Trajectory, trajectory: Trajectory) -> None:
    message.trajectory_id = trajectory.trajectory_id
    message.policy_id = trajectory.policy_id
    message.agent = trajectory.agent
    message.version_spans.extend(map(_encode_version_span, trajectory.version_spans))
    message.sampling.MergeFromString(write_sampling(trajectory.sampling))
    message.finish_reason = FINISH_REASONS.encode(trajectory.finish_reason)
    message.parent_trajectory_id = trajectory.parent_trajectory_id or ""
    message.branch_offset = trajectory.branch_offset
    message.segment_index = trajectory.segment_index
    if trajectory.reward is not None:
        message.reward = trajectory.reward
    message.engine = trajectory.engine
    if trajectory.payload is not None:
        message.payload.CopyFrom(encode_payload(trajectory.payload))
    else:
        _fill_arrays(message, trajectory)


def decode_trajectory(message: trajectory_pb2.Trajectory) -> Trajectory:
    name, policy, parent = message.trajectory_id, message.policy_id, message.parent_trajectory_id
    segment = message.segment_index
    payload = _decode_reference(message) if message.HasField("payload") else None
    return Trajectory(
        trajectory_id=TrajectoryId(name or required(name, "trajectory_id")),
        policy_id=PolicyId(policy or required(policy, "policy_id")),
        agent=message.agent,
        **(_decode_arrays(message) if payload is None else _ELSEWHERE),
        version_spans=tuple(map(_decode_version_span, message.version_spans)),
        sampling=read_sampling(message.sampling.SerializeToString()),
        finish_reason=FINISH_REASONS.decode(message.finish_reason),
        parent_trajectory_id=TrajectoryId(parent) if parent else None,
        branch_offset=message.branch_offset,
        segment_index=at_least(segment, 0, "segment_index") if segment else 0,
        reward=message.reward if message.HasField("reward") else None,
        engine=message.engine,
        payload=payload,
    )


def _decode_reference(message: trajectory_pb2.Trajectory) -> Payload:
    if message.HasField("tokens") or message.columns:
        raise invalid("payload", "the arrays of a trajectory are here or there, not both")
    return decode_payload(message.payload)


converted(
    Trajectory,
    trajectory_pb2.Trajectory,
    encode_trajectory,
    decode_trajectory,
    fill=_fill_trajectory,
)


encode_rollout, _decode_rollout = converter(
    Rollout,
    rollout_pb2.Rollout,
    rollout_id=required,
    task_id=required,
    group_id=required,
    policy_versions=FieldRule(),
)


def decode_rollout(message: rollout_pb2.Rollout) -> Rollout:
    if scan is not None:
        data = message.SerializeToString()
        usual = scan(data)
        if usual is not None:
            return _rollout(data, usual)
    return _decode_rollout(message)


# Of a message, beside its arrays: what a node puts into one has some hundred bytes per trajectory.
# In objects they take up to a hundred times as much.
_MOST_NBYTES: Final = 2 << 20

# What a message adds to a single item.
_FRAME_NBYTES: Final = 64


def is_read(item: raas_service_pb2.RolloutItem, max_message_nbytes: int) -> bool:
    """Whether a run reads an item that comes alone."""
    nbytes = item.ByteSize() + _FRAME_NBYTES
    if nbytes <= min(_MOST_NBYTES, max_message_nbytes):
        return True
    message = raas_service_pb2.StreamRolloutsRequest(items=[item])
    return nbytes <= max_message_nbytes and _is_read(message.SerializeToString())


def _is_read(data: bytes) -> bool:
    return len(data) <= _MOST_NBYTES or (fits or fits_in_python)(data, _MOST_NBYTES)


def read_items(data: bytes) -> list[tuple[bool, bytes]]:
    """Return the items of a serialized StreamRolloutsRequest: whether it is a rollout, its bytes.

    Raises:
        AstraflowError: INVALID_FIELD for what is none, MESSAGE_TOO_LARGE.
    """
    if not _is_read(data):
        raise AstraflowError(
            Reason.MESSAGE_TOO_LARGE,
            f"a message of rollouts has at most {_MOST_NBYTES} bytes beside the elements of its "
            "arrays; send fewer items in one, or rollouts of fewer trajectories",
        )
    found = None if split is None else split(data)
    if found is not None:
        return [(is_rollout, data[start:end]) for is_rollout, start, end in found]
    try:
        items = raas_service_pb2.StreamRolloutsRequest.FromString(data).items
    except DecodeError as error:
        raise invalid("items", str(error)) from error
    rollouts = [item.WhichOneof("item") == "rollout" for item in items]
    return [
        (is_rollout, (item.rollout if is_rollout else item.result).SerializeToString())
        for is_rollout, item in zip(rollouts, items, strict=True)
    ]


# The fields that arrays are in, of StreamRolloutsRequest and what it is made of; 0: elements.
_TENSOR: Final = {3: 0}
_TRAJECTORY: Final = {4: _TENSOR, 5: _TENSOR, 6: _TENSOR, 14: {2: {2: _TENSOR}}}
_REQUEST: Final = {1: {1: {10: _TRAJECTORY}}}


def fits_in_python(data: bytes, most: int) -> bool:
    """Say what `fits` says."""
    return _spare(memoryview(data), _REQUEST, most) >= 0


def _spare(data: memoryview, arrays: Mapping[int, Any], left: int) -> int:
    """Return what a message leaves of so many bytes, elements of arrays not counted."""
    at = 0
    while left >= 0 and at < len(data):
        try:
            number, start, end = _field_at(data, at)
        except (IndexError, ValueError):
            # What is malformed is no array.
            break
        left -= end - at
        at = end
        inner: Any = arrays.get(number)
        if inner is not None:
            left += end - start
            left = _spare(data[start:end], inner, left) if inner else left
    return left if left < 0 else left - (len(data) - at)


def _field_at(data: memoryview, at: int) -> tuple[int, int, int]:
    """Return a field's number, and where what has a length begins and ends; else its end twice."""
    tag, at = _varint_at(data, at, bits=32)
    match tag & 7:
        case 0:
            _, start = _varint_at(data, at)
            end = start
        case 1:
            start = end = at + 8
        case 2:
            size, start = _varint_at(data, at, bits=32)
            end = start + size
        case kind:
            raise ValueError(f"wire type {kind}")
    if end > len(data):
        raise IndexError(end)
    return tag >> 3, start, end


def _varint_at(data: memoryview, at: int, *, bits: int = 64) -> tuple[int, int]:
    """Return a number of so many bits, and where it ends."""
    # Nearly all are of one byte.
    if (value := data[at]) < 0x80:
        return value, at + 1
    value = 0
    for place, shift in enumerate(range(0, bits, 7), at):
        value |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            break
    else:
        raise ValueError("too long")
    if value >> bits:
        raise ValueError("too large")
    return value, place + 1


def read_rollout(data: bytes) -> tuple[Rollout, bytes]:
    """Read a serialized Rollout, whole; its arrays may lie over `data`.

    Returns:
        It, and what it is passed on as: `data`, in protobuf's own order where it is unusual.

    Raises:
        AstraflowError: As `decode_rollout`; INVALID_FIELD also for what is no Rollout.
    """
    usual = None if scan is None else scan(data)
    try:
        if usual is not None:
            return _rollout(data, usual), data
        message = rollout_pb2.Rollout.FromString(data)
    except DecodeError as error:
        raise invalid("rollout", str(error)) from error
    return _decode_rollout(message), message.SerializeToString()


def read_task_result(data: bytes) -> TaskResult:
    """Read a serialized TaskResult.

    Raises:
        AstraflowError: As `decode_task_result`; INVALID_FIELD also for what is none.
    """
    try:
        return decode_task_result(rollout_pb2.TaskResult.FromString(data))
    except DecodeError as error:
        raise invalid("result", str(error)) from error


def _rollout(data: bytes, parts: Any) -> Rollout:
    """Return what `scan` found."""
    name, task, group, index, outcome, reward, reward_parts, digest, trajectories = parts[:9]
    metrics, start_time, finish_time, traceparent = parts[9:]
    rollout = Rollout(
        rollout_id=RolloutId(name or required(name, "rollout_id")),
        task_id=TaskId(task or required(task, "task_id")),
        group_id=GroupId(group or required(group, "group_id")),
        sample_index=index or 0,
        outcome=OUTCOMES.decode(outcome or 0),
        reward=reward,
        reward_parts=reward_parts or {},
        reward_code_digest=digest or b"",
        trajectories=tuple([_trajectory(data, each) for each in trajectories]),
        metrics=metrics or {},
        start_time=None if start_time is None else moment_of(*start_time),
        finish_time=None if finish_time is None else moment_of(*finish_time),
        traceparent=traceparent or "",
    )
    object.__setattr__(rollout, "received", data)
    return rollout


def _trajectory(data: bytes, parts: Any) -> Trajectory:
    name, policy, agent, count, tokens, mask, logprobs, spans, sampling = parts[:9]
    finish, parent, branch, segment, reward, engine, at, end = parts[9:]
    is_here = tokens is not None
    trajectory = Trajectory(
        trajectory_id=TrajectoryId(name or required(name, "trajectory_id")),
        policy_id=PolicyId(policy or required(policy, "policy_id")),
        agent=agent or "",
        tokens=np.frombuffer(data, _I32, count, tokens) if is_here else _NOTHING,
        sampled_mask=np.frombuffer(data, _BOOL, count, mask) if is_here else _NOTHING,
        logprobs=np.frombuffer(data, _F32, count, logprobs) if is_here else _NOTHING,
        columns={},
        version_spans=tuple(
            [
                VersionSpan(
                    version=version,
                    length=length,
                    kv=KV_POLICIES.decode(kv),
                    policy_id=PolicyId(policy) if policy else None,
                )
                for version, length, kv, policy in spans
            ]
        ),
        sampling=read_sampling(sampling or b""),
        finish_reason=FINISH_REASONS.decode(finish or 0),
        parent_trajectory_id=TrajectoryId(parent) if parent else None,
        branch_offset=branch or 0,
        segment_index=at_least(segment, 0, "segment_index") if segment else 0,
        reward=reward,
        engine=engine or "",
        payload=None if is_here else _payload(*count),
    )
    object.__setattr__(trajectory, "received", memoryview(data)[at:end])
    return trajectory


def _payload(name: str, digest: bytes, nbytes: int, token_count: int) -> Payload:
    return Payload(
        digest=_digest(digest, "digest"),
        name=_payload_name(name, "name"),
        nbytes=at_least(nbytes, 1, "nbytes"),
        token_count=token_count,
    )


encode_task_result, decode_task_result = converter(
    TaskResult,
    rollout_pb2.TaskResult,
    task_id=required,
    rollout_count=least(0),
    failures=FieldRule(most=1 << 16),
)


def _must_be_of_world(header: BatchHeader) -> None:
    if not 0 <= header.rank < header.world_size:
        raise invalid("rank", f"{header.rank} is none of {header.world_size}")


encode_batch_header, decode_batch_header = converter(
    BatchHeader,
    batch_pb2.BatchHeader,
    check=_must_be_of_world,
    # Of the hub that sends it, not of the run.
    without={"payload_url"},
    batch_id=required,
    policy_id=required,
    part_count=least(0),
    delivery_count=least(1),
)


def _decode_source(message: batch_pb2.RowSource) -> RowSource:
    return RowSource(
        trajectory=decode_trajectory(message.trajectory),
        advantage=message.advantage,
        is_masked=message.masked,
        loss_weight=message.loss_weight if message.HasField("loss_weight") else None,
    )


_SOURCE_TAG = tag_of(batch_pb2.BatchPart, "sources")
_TRAJECTORY_TAG = tag_of(batch_pb2.RowSource, "trajectory")


def batch_part_pieces(part: BatchPart) -> list[bytes | memoryview]:
    """Return a serialized BatchPart in pieces: megabytes that came so are not read again."""
    message = batch_pb2.BatchPart(
        batch_id=part.batch_id,
        index=part.index,
        trajectory_ids=part.trajectory_ids,
        rollout_ids=part.rollout_ids,
    )
    fill_tensor(message.row_offsets, part.row_offsets)
    fill_columns(message.columns, part.columns)
    pieces: list[bytes | memoryview] = [message.SerializeToString()]
    for source in part.sources:
        pieces += message_field(_SOURCE_TAG, _source_pieces(source))
    return pieces


def _source_pieces(source: RowSource) -> list[bytes | memoryview]:
    trajectory = source.trajectory
    said = trajectory.received or encode_trajectory(trajectory).SerializeToString()
    rest = batch_pb2.RowSource(
        advantage=source.advantage, masked=source.is_masked, loss_weight=source.loss_weight
    )
    return [*message_field(_TRAJECTORY_TAG, [said]), rest.SerializeToString()]


def decode_batch_part(message: batch_pb2.BatchPart) -> BatchPart:
    return BatchPart(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        index=at_least(message.index, 0, "index"),
        row_offsets=decode_vector(message.row_offsets, Dtype.I64, "row_offsets"),
        trajectory_ids=tuple(map(TrajectoryId, message.trajectory_ids)),
        rollout_ids=tuple(map(RolloutId, message.rollout_ids)),
        columns=decode_columns(message.columns),
        sources=tuple(map(_decode_source, message.sources)),
    )


encode_end_of_data, decode_end_of_data = converter(EndOfData, batch_pb2.EndOfData)
