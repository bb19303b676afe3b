"""astraflow.weights.v1: what a puller asks a source for, and how the answer begins."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Self

from astraflow.core.ids import PolicyId
from astraflow.core.versions import CodecProfile, LaneKind
from astraflow.wire.fields import at_least, invalid, optional, optional_time, required, set_time
from astraflow.wire.weights import (
    DIGEST_NBYTES,
    LANES,
    PROFILES,
    PatchIndex,
    SentChunk,
    decode_patch_index,
    encode_patch_index,
)
from astraflow_proto.weights.v1 import layout_pb2, transfer_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSet:
    """Chunks of one patch.

    Attributes:
        root_digest: Of the patch.
        indexes: Runs of chunk indexes, rising, without overlap; empty: all.
    """

    root_digest: bytes
    indexes: tuple[range, ...] = ()

    @classmethod
    def of(cls, root_digest: bytes, indexes: Iterable[int]) -> Self:
        """Return the set of some indexes; at least one."""
        runs: list[range] = []
        for index in sorted(indexes):
            if runs and runs[-1].stop == index:
                runs[-1] = range(runs[-1].start, index + 1)
            else:
                runs.append(range(index, index + 1))
        return cls(root_digest=root_digest, indexes=tuple(runs))

    def __contains__(self, index: int) -> bool:
        if not self.indexes:
            return True
        at = bisect_right(self.indexes, index, key=lambda run: run.start) - 1
        return at >= 0 and index in self.indexes[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """What a puller wants, has and can do; see `weights/v1/transfer.proto`.

    Attributes:
        policy_id: Whose weights.
        version: What is wanted.
        base_version: What is held; None: nothing.
        layout_digest: Of both.
        profiles: In order of preference; empty: the source chooses.
        goodput_bytes_per_s: Measured by the puller on this link; 0: unknown.
        core_count: Cores it can decode on; 0: unknown.
        max_memory_nbytes: For staging; 0: no limit.
        ranges: Parts of the layout that are wanted, in bytes; empty: all.
        want_chunks: Only these; empty: all.
        have_chunks: Not these.
        is_ahead: The version may be still to come: it is sent as it is made.
    """

    policy_id: PolicyId
    version: int
    base_version: int | None = None
    layout_digest: bytes = b""
    profiles: tuple[CodecProfile, ...] = ()
    goodput_bytes_per_s: float = 0.0
    core_count: int = 0
    max_memory_nbytes: int = 0
    ranges: tuple[range, ...] = ()
    want_chunks: tuple[ChunkSet, ...] = ()
    have_chunks: tuple[ChunkSet, ...] = ()
    is_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEndpoint:
    """Where a lane is picked up: host:port, a path for shared memory, or a URI."""

    lane: LaneKind
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What a source will send; patches are applied in this order.

    Attributes:
        transfer_id: Names the transfer at its source.
        patches: What leads to the version.
        chunk_count: Chunks to be sent.
        payload_nbytes: Of the chunks to be sent.
        endpoints: Where else the chunks can be had.
        token: Secret of this transfer, presented on every connection of its lanes.
        expire_time: What the transfer needs is kept until then.
    """

    transfer_id: str
    patches: tuple[PatchIndex, ...]
    chunk_count: int
    payload_nbytes: int
    endpoints: tuple[LaneEndpoint, ...] = ()
    token: bytes = b""
    expire_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The source is there, and has nothing to send yet.

    Attributes:
        since_s: By the monotonic clock: what comes next has been on its way since then, because
            it was asked for ahead. None: it was not. It does not travel.
    """

    since_s: float | None = None


SentItem = TransferPlan | SentChunk | Waiting
"""What comes of a pull."""


def encode_transfer_spec(spec: TransferSpec) -> transfer_pb2.TransferSpec:
    return transfer_pb2.TransferSpec(
        policy_id=spec.policy_id,
        version=spec.version,
        base_version=spec.base_version,
        layout_digest=spec.layout_digest,
        profiles=map(PROFILES.encode, spec.profiles),
        goodput_bytes_per_s=spec.goodput_bytes_per_s,
        core_count=spec.core_count,
        max_memory_nbytes=spec.max_memory_nbytes,
        ranges=[layout_pb2.ByteRange(offset=each.start, nbytes=len(each)) for each in spec.ranges],
        want_chunks=map(_encode_chunk_set, spec.want_chunks),
        have_chunks=map(_encode_chunk_set, spec.have_chunks),
        ahead=spec.is_ahead,
    )


def decode_transfer_spec(message: transfer_pb2.TransferSpec) -> TransferSpec:
    return TransferSpec(
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=at_least(message.version, 0, "version"),
        base_version=optional(message, "base_version"),
        layout_digest=message.layout_digest,
        profiles=tuple(map(PROFILES.decode, message.profiles)),
        goodput_bytes_per_s=message.goodput_bytes_per_s,
        core_count=at_least(message.core_count, 0, "core_count"),
        max_memory_nbytes=at_least(message.max_memory_nbytes, 0, "max_memory_nbytes"),
        ranges=tuple(_decode_byte_range(each) for each in message.ranges),
        want_chunks=tuple(map(_decode_chunk_set, message.want_chunks)),
        have_chunks=tuple(map(_decode_chunk_set, message.have_chunks)),
        is_ahead=message.ahead,
    )


def _encode_chunk_set(chunks: ChunkSet) -> transfer_pb2.ChunkSet:
    runs = [transfer_pb2.IndexRange(first=run.start, count=len(run)) for run in chunks.indexes]
    return transfer_pb2.ChunkSet(root_digest=chunks.root_digest, indexes=runs)


def _decode_chunk_set(message: transfer_pb2.ChunkSet) -> ChunkSet:
    if len(message.root_digest) != DIGEST_NBYTES:
        raise invalid("root_digest", f"needs {DIGEST_NBYTES} bytes")
    runs = [range(each.first, each.first + each.count) for each in message.indexes]
    if any(not 0 <= run.start < run.stop for run in runs):
        raise invalid("indexes", "a range needs a first of at least 0 and a count of at least 1")
    if any(after.start < before.stop for before, after in pairwise(runs)):
        raise invalid("indexes", "ranges must rise and not overlap")
    return ChunkSet(root_digest=message.root_digest, indexes=tuple(runs))


def _decode_byte_range(message: layout_pb2.ByteRange) -> range:
    if message.offset < 0 or message.nbytes < 1:
        raise invalid("ranges", "a range needs an offset of at least 0 and at least 1 byte")
    return range(message.offset, message.offset + message.nbytes)


def encode_transfer_plan(plan: TransferPlan) -> transfer_pb2.TransferPlan:
    message = transfer_pb2.TransferPlan(
        transfer_id=plan.transfer_id,
        patches=map(encode_patch_index, plan.patches),
        chunk_count=plan.chunk_count,
        payload_nbytes=plan.payload_nbytes,
        endpoints=map(_encode_lane_endpoint, plan.endpoints),
        token=plan.token,
    )
    set_time(message.expire_time, plan.expire_time)
    return message


def decode_transfer_plan(message: transfer_pb2.TransferPlan) -> TransferPlan:
    return TransferPlan(
        transfer_id=message.transfer_id,
        patches=tuple(map(decode_patch_index, message.patches)),
        chunk_count=at_least(message.chunk_count, 0, "chunk_count"),
        payload_nbytes=at_least(message.payload_nbytes, 0, "payload_nbytes"),
        endpoints=tuple(map(_decode_lane_endpoint, message.endpoints)),
        token=message.token,
        expire_time=optional_time(message, "expire_time"),
    )


def _encode_lane_endpoint(endpoint: LaneEndpoint) -> transfer_pb2.LaneEndpoint:
    return transfer_pb2.LaneEndpoint(lane=LANES.encode(endpoint.lane), address=endpoint.address)


def _decode_lane_endpoint(message: transfer_pb2.LaneEndpoint) -> LaneEndpoint:
    return LaneEndpoint(
        lane=LANES.decode(message.lane), address=required(message.address, "address")
    )
