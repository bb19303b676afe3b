"""astraflow.weights.v1: layouts, patches and their digests."""

import struct

from blake3 import blake3

from astraflow.core.layout import Layout, TensorSpec
from astraflow.core.versions import CodecProfile, LaneKind, PatchInfo
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import DTYPES, at_least, invalid, optional, required
from astraflow_proto.weights.v1 import layout_pb2, patch_pb2, transfer_pb2

PROFILES = EnumTable(CodecProfile, patch_pb2.CodecProfile, "CODEC_PROFILE")
LANES = EnumTable(LaneKind, transfer_pb2.Lane, "LANE")

DIGEST_NBYTES = 32
STATE_DIGEST_NBYTES = 16


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
    """Return a Layout for the wire."""
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
            than their shape says.
    """
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


def encode_patch_info(patch: PatchInfo) -> patch_pb2.PatchInfo:
    """Return a PatchInfo for the wire."""
    return patch_pb2.PatchInfo(
        base_version=patch.base_version,
        version=patch.version,
        profile=PROFILES.encode(patch.profile),
        codec_version=patch.codec_version,
        root_digest=patch.root_digest,
        chunk_count=patch.chunk_count,
        payload_nbytes=patch.payload_nbytes,
        shard_rank=patch.shard_rank,
        shard_count=patch.shard_count,
    )


def decode_patch_info(message: patch_pb2.PatchInfo) -> PatchInfo:
    """Read a PatchInfo.

    Raises:
        AstraflowError: INVALID_FIELD for a digest of another size, a base that is not older, or
            a shard that is none of the count's.
    """
    base = optional(message, "base_version")
    if base is not None and not 0 <= base < message.version:
        raise invalid("base_version", f"{base} is not older than {message.version}")
    if len(message.root_digest) != DIGEST_NBYTES:
        raise invalid("root_digest", f"needs {DIGEST_NBYTES} bytes")
    if not 0 <= message.shard_rank < message.shard_count:
        raise invalid("shard_rank", f"{message.shard_rank} is none of {message.shard_count}")
    return PatchInfo(
        base_version=base,
        version=at_least(message.version, 0, "version"),
        profile=PROFILES.decode(message.profile),
        codec_version=message.codec_version,
        root_digest=message.root_digest,
        chunk_count=at_least(message.chunk_count, 0, "chunk_count"),
        payload_nbytes=at_least(message.payload_nbytes, 0, "payload_nbytes"),
        shard_rank=message.shard_rank,
        shard_count=message.shard_count,
    )
