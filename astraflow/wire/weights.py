"""astraflow.weights.v1: layouts, patches, chunks, and the digests that verify them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.core.tensors import Layout, TensorSpec
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.wire.converters import converter, least, sized
from astraflow.wire.fields import DTYPES, EnumTable, at_least, invalid, required
from astraflow_proto.weights.v1 import layout_pb2, patch_pb2

PROFILES = EnumTable(CodecProfile, patch_pb2.CodecProfile, "CODEC_PROFILE")
DIGEST_NBYTES = 32
STATE_DIGEST_NBYTES = 16
SIGNATURE_NBYTES = 64
KEY_NBYTES = 32


def layout_digest(layout: Layout) -> bytes:
    """Return BLAKE3 of the layout's canonical form, 32 bytes."""
    return blake3(layout.canonical(DTYPES.numbers)).digest()


def chunk_digest(header: patch_pb2.ChunkHeader, payload: bytes | memoryview) -> bytes:
    """Return BLAKE3 of a chunk's canonical form, 32 bytes.

    The header's fields in order of number, each as 8 bytes, little-endian; then the payload's
    length and the payload (`weights/v1/layout.proto` defines the form).
    """
    fields = (
        header.index,
        header.offset,
        header.nbytes,
        header.dtype,
        header.encoding,
        header.compression,
        header.payload_nbytes,
        header.changed_count,
    )
    hasher = blake3(struct.pack("<9Q", *fields, len(payload)))
    hasher.update(payload)
    return hasher.digest()


def encode_layout(layout: Layout) -> layout_pb2.Layout:
    specs = [
        layout_pb2.TensorSpec(
            name=spec.name,
            dtype=DTYPES.encode(spec.dtype),
            shape=spec.shape,
            offset=spec.offset,
            nbytes=spec.nbytes,
        )
        for spec in layout.tensors
    ]
    return layout_pb2.Layout(tensors=specs, nbytes=layout.nbytes)


def decode_layout(message: layout_pb2.Layout) -> Layout:
    """Read a Layout.

    Raises:
        AstraflowError: INVALID_FIELD when tensors overlap, are misaligned or have another size
            than their shape says; for one that says what it adapts.
    """
    if message.HasField("adapter"):
        # Its digest would be another one than this release counts.
        raise invalid("adapter", "layouts that have it are not read here; leave it out")
    specs: list[TensorSpec] = []
    for each in message.tensors:
        spec = TensorSpec(
            name=required(each.name, "name"),
            dtype=DTYPES.decode(each.dtype),
            shape=tuple(each.shape),
            offset=at_least(each.offset, 0, "offset"),
        )
        if spec.nbytes != each.nbytes:
            raise invalid("nbytes", f"tensor {spec.name} has {spec.nbytes}, not {each.nbytes}")
        specs.append(spec)
    return Layout(tensors=tuple(specs), nbytes=message.nbytes)


def _must_be_sound(patch: PatchInfo) -> None:
    base = patch.base_version
    if base is not None and not 0 <= base < patch.version:
        raise invalid("base_version", f"{base} is not older than {patch.version}")
    if not 0 <= patch.shard_rank < patch.shard_count:
        raise invalid("shard_rank", f"{patch.shard_rank} is none of {patch.shard_count}")


converter(
    PatchInfo,
    patch_pb2.PatchInfo,
    check=_must_be_sound,
    version=least(0),
    root_digest=sized(DIGEST_NBYTES),
    chunk_count=least(0),
    payload_nbytes=least(0),
    signature=sized(SIGNATURE_NBYTES, or_none=True),
)

ENCODINGS = EnumTable(Encoding, patch_pb2.Encoding, "ENCODING")
COMPRESSIONS = EnumTable(Compression, patch_pb2.Compression, "COMPRESSION")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchIndex:
    """What a puller needs to verify and decode the chunks of a patch.

    Attributes:
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


encode_chunk_header, decode_chunk_header = converter(
    ChunkHeader,
    patch_pb2.ChunkHeader,
    index=least(0),
    offset=least(0),
    nbytes=least(1),
    payload_nbytes=least(0),
    changed_count=least(0),
)


def encode_sent_chunk(sent: SentChunk) -> patch_pb2.Chunk:
    return patch_pb2.Chunk(
        header=encode_chunk_header(sent.chunk.header),
        payload=bytes(sent.chunk.payload),
        patch_index=sent.patch_index,
    )


def decode_sent_chunk(message: patch_pb2.Chunk) -> SentChunk:
    return SentChunk(
        patch_index=at_least(message.patch_index, 0, "patch_index"),
        chunk=Chunk(header=decode_chunk_header(message.header), payload=message.payload),
    )


def _must_have_digests(index: PatchIndex) -> None:
    digests, count = index.chunk_digests, index.patch.chunk_count
    if len(digests) != count or any(len(each) != DIGEST_NBYTES for each in digests):
        raise invalid("chunk_digests", f"need {count} of {DIGEST_NBYTES} bytes")


encode_patch_index, decode_patch_index = converter(
    PatchIndex, patch_pb2.PatchIndex, check=_must_have_digests
)
