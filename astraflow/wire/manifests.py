"""astraflow.weights.v1, the object store side: what a folder of a version holds."""

from dataclasses import dataclass
from itertools import accumulate

from blake3 import blake3
from google.protobuf.message import DecodeError

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkHeader
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.wire.fields import invalid
from astraflow.wire.patches import (
    PatchIndex,
    decode_chunk_header,
    decode_patch_index,
    encode_chunk_header,
    encode_patch_index,
)
from astraflow.wire.versions import decode_version_info, encode_version_info
from astraflow.wire.weights import DIGEST_NBYTES, decode_patch_info, encode_patch_info
from astraflow_proto.weights.v1 import object_store_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchObject:
    """An object with the payloads of a patch, one behind the other.

    Attributes:
        index: Digests and tables.
        headers: By chunk index.
    """

    index: PatchIndex
    headers: tuple[ChunkHeader, ...]

    def offsets(self) -> tuple[int, ...]:
        """Return where each payload begins, and where the last one ends."""
        return (0, *accumulate(header.payload_nbytes for header in self.headers))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """What an object store has of a version; see `weights/v1/object_store.proto`.

    Attributes:
        version: Without patches and sources.
        patches: In this version's folder.
        reachable: All that the store had when this was written.
    """

    version: VersionInfo
    patches: tuple[PatchObject, ...]
    reachable: tuple[PatchInfo, ...]


def write_manifest(manifest: VersionManifest) -> bytes:
    """Return the bytes of a manifest's object."""
    message = pb.VersionManifest(
        version=encode_version_info(manifest.version),
        patches=map(_encode_patch_object, manifest.patches),
        reachable=map(encode_patch_info, manifest.reachable),
    )
    body = message.SerializeToString(deterministic=True)
    return blake3(body).digest() + body


def read_manifest(content: bytes) -> VersionManifest:
    """Read a manifest's object.

    Raises:
        AstraflowError: INVALID_FIELD when it is torn, or says what cannot be true.
    """
    body = content[DIGEST_NBYTES:]
    if len(content) < DIGEST_NBYTES or blake3(body).digest() != content[:DIGEST_NBYTES]:
        raise invalid("manifest", "is torn: its digest is another one")
    try:
        message = pb.VersionManifest.FromString(body)
    except DecodeError as error:
        raise invalid("manifest", f"is none: {error}") from error
    return VersionManifest(
        version=decode_version_info(message.version),
        patches=tuple(map(_decode_patch_object, message.patches)),
        reachable=tuple(map(decode_patch_info, message.reachable)),
    )


def _encode_patch_object(patch: PatchObject) -> pb.PatchObject:
    return pb.PatchObject(
        index=encode_patch_index(patch.index), headers=map(encode_chunk_header, patch.headers)
    )


def _decode_patch_object(message: pb.PatchObject) -> PatchObject:
    index = decode_patch_index(message.index)
    headers = tuple(map(decode_chunk_header, message.headers))
    if [header.index for header in headers] != [*range(index.patch.chunk_count)]:
        raise invalid("headers", "are not those of the patch's chunks, by index")
    if any(header.payload_nbytes > CHUNK_NBYTES for header in headers):
        raise invalid("headers", f"a payload has more than {CHUNK_NBYTES} bytes")
    if sum(header.payload_nbytes for header in headers) != index.patch.payload_nbytes:
        raise invalid("headers", f"do not add up to {index.patch.payload_nbytes} bytes")
    return PatchObject(index=index, headers=headers)
