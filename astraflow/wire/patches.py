"""astraflow.weights.v1, the transfer side: chunks, patch indexes, specs and plans."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Self

from blake3 import blake3

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.core.ids import PolicyId
from astraflow.core.versions import CodecProfile, Lane, PatchInfo
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import (
    DTYPES,
    at_least,
    invalid,
    optional,
    optional_time,
    required,
    set_time,
)
from astraflow.wire.weights import (
    DIGEST_NBYTES,
    LANES,
    PROFILES,
    chunk_digest,
    decode_patch_info,
    encode_patch_info,
)
from astraflow_proto.weights.v1 import layout_pb2, patch_pb2, transfer_pb2

ENCODINGS = EnumTable(Encoding, patch_pb2.Encoding, "ENCODING")
COMPRESSIONS = EnumTable(Compression, patch_pb2.Compression, "COMPRESSION")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchIndex:
    """What a puller needs to verify and decode the chunks of a patch.

    Attributes:
        patch: Names it.
        chunk_digests: BLAKE3, 32 bytes each, by chunk index.
        shared_tables: Entropy tables used by all chunks.
    """

    patch: PatchInfo
    chunk_digests: tuple[bytes, ...]
    shared_tables: bytes = b""

    @property
    def root_digest(self) -> bytes:
        """What the digests and tables add up to; the run registered what it must be."""
        return root_digest(self.chunk_digests, self.shared_tables)


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

    lane: Lane
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChunk:
    """A chunk of the plan's patch number `patch_index`."""

    patch_index: int
    chunk: Chunk


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


def root_digest(chunk_digests: Sequence[bytes], shared_tables: bytes = b"") -> bytes:
    """Return BLAKE3 over BLAKE3(shared_tables), then the chunk digests by index: 32 bytes."""
    return blake3(b"".join([blake3(shared_tables).digest(), *chunk_digests])).digest()


def digest_of(chunk: Chunk) -> bytes:
    """Return a chunk's digest, 32 bytes."""
    return chunk_digest(encode_chunk_header(chunk.header), chunk.payload)


def encode_chunk_header(header: ChunkHeader) -> patch_pb2.ChunkHeader:
    """Return a ChunkHeader for the wire."""
    return patch_pb2.ChunkHeader(
        index=header.index,
        offset=header.offset,
        nbytes=header.nbytes,
        dtype=DTYPES.encode(header.dtype),
        encoding=ENCODINGS.encode(header.encoding),
        compression=COMPRESSIONS.encode(header.compression),
        payload_nbytes=header.payload_nbytes,
        changed_count=header.changed_count,
    )


def decode_chunk_header(message: patch_pb2.ChunkHeader) -> ChunkHeader:
    """Read a ChunkHeader; whether it can be true of a layout is checked with the layout.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return ChunkHeader(
        index=at_least(message.index, 0, "index"),
        offset=at_least(message.offset, 0, "offset"),
        nbytes=at_least(message.nbytes, 1, "nbytes"),
        dtype=DTYPES.decode(message.dtype),
        encoding=ENCODINGS.decode(message.encoding),
        compression=COMPRESSIONS.decode(message.compression),
        payload_nbytes=at_least(message.payload_nbytes, 0, "payload_nbytes"),
        changed_count=at_least(message.changed_count, 0, "changed_count"),
    )


def encode_sent_chunk(sent: SentChunk) -> patch_pb2.Chunk:
    """Return a chunk for the wire."""
    return patch_pb2.Chunk(
        header=encode_chunk_header(sent.chunk.header),
        payload=bytes(sent.chunk.payload),
        patch_index=sent.patch_index,
    )


def decode_sent_chunk(message: patch_pb2.Chunk) -> SentChunk:
    """Read a chunk.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return SentChunk(
        patch_index=at_least(message.patch_index, 0, "patch_index"),
        chunk=Chunk(header=decode_chunk_header(message.header), payload=message.payload),
    )


def encode_patch_index(index: PatchIndex) -> patch_pb2.PatchIndex:
    """Return a PatchIndex for the wire."""
    return patch_pb2.PatchIndex(
        patch=encode_patch_info(index.patch),
        chunk_digests=index.chunk_digests,
        shared_tables=index.shared_tables,
    )


def decode_patch_index(message: patch_pb2.PatchIndex) -> PatchIndex:
    """Read a PatchIndex.

    Raises:
        AstraflowError: INVALID_FIELD; DIGEST_MISMATCH is the caller's to find.
    """
    digests = tuple(message.chunk_digests)
    patch = decode_patch_info(message.patch)
    if len(digests) != patch.chunk_count or any(len(each) != DIGEST_NBYTES for each in digests):
        raise invalid("chunk_digests", f"need {patch.chunk_count} of {DIGEST_NBYTES} bytes")
    return PatchIndex(patch=patch, chunk_digests=digests, shared_tables=message.shared_tables)


def encode_transfer_spec(spec: TransferSpec) -> transfer_pb2.TransferSpec:
    """Return a TransferSpec for the wire."""
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
    """Read a TransferSpec.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
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
    """Return a TransferPlan for the wire."""
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
    """Read a TransferPlan.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
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
