"""astraflow.weights.v1: chunks, and what tells a puller how to verify them."""

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.core.versions import PatchInfo
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import DTYPES, at_least, invalid
from astraflow.wire.weights import DIGEST_NBYTES, chunk_digest, decode_patch_info, encode_patch_info
from astraflow_proto.weights.v1 import patch_pb2

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
