"""astraflow.weights.v1, the transfer side: chunks, patch indexes, specs and plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from blake3 import blake3

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.core.ids import PolicyId
from astraflow.core.versions import CodecProfile, PatchInfo
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
    PROFILES,
    chunk_digest,
    decode_patch_info,
    encode_patch_info,
)
from astraflow_proto.weights.v1 import patch_pb2, transfer_pb2

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
    """Chunks of one patch, by index; no indexes: all."""

    root_digest: bytes
    indexes: frozenset[int] = frozenset()

    def __contains__(self, index: int) -> bool:
        return not self.indexes or index in self.indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """What a puller wants, has and can do; see `weights/v1/transfer.proto`."""

    policy_id: PolicyId
    version: int
    base_version: int | None = None
    layout_digest: bytes = b""
    profiles: tuple[CodecProfile, ...] = ()
    max_memory_nbytes: int = 0
    want_chunks: tuple[ChunkSet, ...] = ()
    have_chunks: tuple[ChunkSet, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What a source will send; patches are applied in this order."""

    transfer_id: str
    patches: tuple[PatchIndex, ...]
    chunk_count: int
    payload_nbytes: int
    expire_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChunk:
    """A chunk of the plan's patch number `patch_index`."""

    patch_index: int
    chunk: Chunk


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
        payload=sent.chunk.payload,
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
        max_memory_nbytes=spec.max_memory_nbytes,
        want_chunks=map(_encode_chunk_set, spec.want_chunks),
        have_chunks=map(_encode_chunk_set, spec.have_chunks),
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
        max_memory_nbytes=at_least(message.max_memory_nbytes, 0, "max_memory_nbytes"),
        want_chunks=tuple(map(_decode_chunk_set, message.want_chunks)),
        have_chunks=tuple(map(_decode_chunk_set, message.have_chunks)),
    )


def _encode_chunk_set(chunks: ChunkSet) -> transfer_pb2.ChunkSet:
    ranges: list[transfer_pb2.IndexRange] = []
    for index in sorted(chunks.indexes):
        if ranges and ranges[-1].first + ranges[-1].count == index:
            ranges[-1].count += 1
        else:
            ranges.append(transfer_pb2.IndexRange(first=index, count=1))
    return transfer_pb2.ChunkSet(root_digest=chunks.root_digest, indexes=ranges)


_MAX_CHUNKS = 1 << 24  # 64 TiB of dense chunks; more is a lie that would cost memory


def _decode_chunk_set(message: transfer_pb2.ChunkSet) -> ChunkSet:
    ranges = [range(each.first, each.first + each.count) for each in message.indexes]
    if any(not 0 <= each.start < each.stop <= _MAX_CHUNKS for each in ranges):
        raise invalid("indexes", "a range needs a first of at least 0 and a count of at least 1")
    if sum(map(len, ranges)) > _MAX_CHUNKS:
        raise invalid("indexes", "name more chunks than any patch has")
    indexes = frozenset(index for each in ranges for index in each)
    return ChunkSet(root_digest=message.root_digest, indexes=indexes)


def encode_transfer_plan(plan: TransferPlan) -> transfer_pb2.TransferPlan:
    """Return a TransferPlan for the wire."""
    message = transfer_pb2.TransferPlan(
        transfer_id=plan.transfer_id,
        patches=map(encode_patch_index, plan.patches),
        chunk_count=plan.chunk_count,
        payload_nbytes=plan.payload_nbytes,
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
        expire_time=optional_time(message, "expire_time"),
    )
