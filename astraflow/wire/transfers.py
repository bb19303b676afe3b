"""astraflow.weights.v1: what a puller asks a source for, and how the answer begins."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from astraflow.codec.rates import DecodeRate
from astraflow.core.ids import PolicyId
from astraflow.core.versions import CodecProfile, LaneKind
from astraflow.wire.converters import FieldRule, converted, converter, least, rate
from astraflow.wire.fields import invalid, required
from astraflow.wire.weights import DIGEST_NBYTES, PatchIndex, SentChunk
from astraflow_proto.weights.v1 import transfer_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSet:
    """Chunks of one patch.

    Attributes:
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
class TransferBound:
    """What a transfer has at most, by what the run registered."""

    patch_count: int
    chunk_count: int
    payload_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """What a puller wants, has and can do; see `weights/v1/transfer.proto`.

    Attributes:
        base_version: What is held; None: nothing.
        profiles: In order of preference; empty: the source chooses.
        goodput_bytes_per_s: Measured by the puller on this link; 0: unknown.
        core_count: Cores it can decode on; 0: unknown.
        decode_rates: What one of them does, by profile, as measured; empty: unknown.
        max_memory_nbytes: For staging; 0: no limit.
        is_ahead: The version may be still to come: it is sent as it is made.
        bound: Who sends more lies; None: what is asked for was not registered. It does not travel.
    """

    policy_id: PolicyId
    version: int
    base_version: int | None = None
    layout_digest: bytes = b""
    profiles: tuple[CodecProfile, ...] = ()
    goodput_bytes_per_s: float = 0.0
    core_count: int = 0
    decode_rates: tuple[DecodeRate, ...] = ()
    max_memory_nbytes: int = 0
    want_chunks: tuple[ChunkSet, ...] = ()
    have_chunks: tuple[ChunkSet, ...] = ()
    is_ahead: bool = False
    bound: TransferBound | None = None

    def had(self, root_digest: bytes) -> ChunkSet | None:
        return next((each for each in self.have_chunks if each.root_digest == root_digest), None)

    def wanted(self, root_digest: bytes, count: int) -> list[int]:
        """Return which of a patch's chunks are asked for, by index."""
        want = [each for each in self.want_chunks if each.root_digest == root_digest]
        had = self.had(root_digest) or ()
        if self.want_chunks and not want:
            return []
        return [n for n in range(count) if n not in had and all(n in each for each in want)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEndpoint:
    """Where a lane is picked up: host:port, a path for shared memory, or a URI."""

    lane: LaneKind
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What a source will send; patches are applied in this order."""

    patches: tuple[PatchIndex, ...]
    chunk_count: int
    payload_nbytes: int


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


converted(ChunkSet, transfer_pb2.ChunkSet, _encode_chunk_set, _decode_chunk_set)

converter(
    DecodeRate,
    transfer_pb2.DecodeRate,
    model_bytes_per_s=rate,
    payload_bytes_per_s=rate,
    whole_bytes_per_s=rate,
)


def _must_name_patches_once(spec: TransferSpec) -> None:
    # Every chunk is looked up in each set of its patch.
    for field, sets in (("want_chunks", spec.want_chunks), ("have_chunks", spec.have_chunks)):
        if len({each.root_digest for each in sets}) < len(sets):
            raise invalid(field, "two sets are of one patch")


encode_transfer_spec, decode_transfer_spec = converter(
    TransferSpec,
    transfer_pb2.TransferSpec,
    check=_must_name_patches_once,
    policy_id=required,
    version=least(0),
    core_count=least(0),
    max_memory_nbytes=least(0),
    is_ahead=FieldRule(name="ahead"),
    without={"bound"},
)

encode_lane_endpoint, decode_lane_endpoint = converter(
    LaneEndpoint, transfer_pb2.LaneEndpoint, address=required
)

encode_transfer_plan, decode_transfer_plan = converter(
    TransferPlan, transfer_pb2.TransferPlan, chunk_count=least(0), payload_nbytes=least(0)
)
