"""astraflow.weights.v1: versions, who has them, how they come to be live or lie in a store."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkHeader
from astraflow.core.ids import PolicyId
from astraflow.core.versions import (
    CodecProfile,
    PatchInfo,
    SourceInfo,
    SourceKind,
    SourceState,
    VersionInfo,
    VersionReport,
)
from astraflow.wire.converters import FieldRule, converter, least, sized, step_count
from astraflow.wire.fields import TABLES, invalid, required
from astraflow.wire.weights import DIGEST_NBYTES, KEY_NBYTES, STATE_DIGEST_NBYTES, PatchIndex
from astraflow_proto.weights.v1 import object_store_pb2 as pb
from astraflow_proto.weights.v1 import version_pb2, version_service_pb2


def _must_have_an_address(source: SourceInfo) -> None:
    is_object_store = source.kind is SourceKind.OBJECT_STORE
    required(source.uri if is_object_store else source.endpoint, "endpoint")


encode_source, decode_source = converter(
    SourceInfo, version_pb2.Source, check=_must_have_an_address
)


class VersionEncoder:
    """Encodes versions for many callers: what is the same for all of them once."""

    def __init__(self) -> None:
        # By policy and version: the patches, which may grow, and the message without sources.
        self._known: dict[
            tuple[PolicyId, int], tuple[tuple[PatchInfo, ...], version_pb2.VersionInfo]
        ] = {}

    def encode(self, info: VersionInfo) -> version_pb2.VersionInfo:
        """Return the message of a version with the sources that one caller gets."""
        key = info.policy_id, info.version
        patches, known = self._known.get(key, ((), None))
        if known is None or patches is not info.patches:
            known = encode_version_info(replace(info, sources=()))
            self._known.pop(key, None)
            self._known[key] = info.patches, known
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        message = version_pb2.VersionInfo()
        message.CopyFrom(known)
        message.sources.extend(map(encode_source, info.sources))
        return message


# Versions of all policies, encoded.
_KEPT: Final = 256


def _must_lead_there(info: VersionInfo) -> None:
    if any(patch.version != info.version for patch in info.patches):
        raise invalid("patches", f"one does not lead to version {info.version}")


encode_version_info, decode_version_info = converter(
    VersionInfo,
    version_pb2.VersionInfo,
    check=_must_lead_there,
    policy_id=required,
    version=least(0),
    layout_digest=sized(DIGEST_NBYTES),
    content_digest=sized(STATE_DIGEST_NBYTES),
    scrub_digest=sized(DIGEST_NBYTES, or_none=True),
    signing_key=sized(KEY_NBYTES, or_none=True),
    step=step_count,
)

# Where a later release may have more members.
_GROWING: Final = {
    "patches": {"profile": CodecProfile},
    "sources": {"kind": SourceKind, "state": SourceState},
}


def leave_out_unknown(message: Message) -> None:
    """Leave out patches and sources of kinds that a later release has named: there are others."""
    for name in message.DESCRIPTOR.fields_by_name.keys() & _GROWING.keys():
        items = getattr(message, name)
        for at in reversed(range(len(items))):
            tables = ((getattr(items[at], each), TABLES[k]) for each, k in _GROWING[name].items())
            if any(number and number not in table.members for number, table in tables):
                del items[at]


encode_version_report, decode_version_report = converter(
    VersionReport,
    version_service_pb2.ReportVersionRequest,
    policy_id=required,
    version=least(0),
    pulled_nbytes=least(0),
    # Of all ranks of a trainer, and the relays and stores beside them.
    reports=FieldRule(most=1 << 16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchObject:
    """An object with the payloads of a patch, one behind the other."""

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


def _must_be_of_chunks(patch: PatchObject) -> None:
    index, headers = patch.index, patch.headers
    if [header.index for header in headers] != [*range(index.patch.chunk_count)]:
        raise invalid("headers", "are not those of the patch's chunks, by index")
    if any(header.payload_nbytes > CHUNK_NBYTES for header in headers):
        raise invalid("headers", f"a payload has more than {CHUNK_NBYTES} bytes")
    if sum(header.payload_nbytes for header in headers) != index.patch.payload_nbytes:
        raise invalid("headers", f"do not add up to {index.patch.payload_nbytes} bytes")


converter(PatchObject, pb.PatchObject, check=_must_be_of_chunks)

_encode_manifest, _decode_manifest = converter(VersionManifest, pb.VersionManifest)


def with_digest(body: bytes) -> bytes:
    """Return a body with its digest before it: what is torn shows."""
    return blake3(body).digest() + body


def without_digest(content: bytes, name: str) -> bytes:
    body = content[DIGEST_NBYTES:]
    if len(content) < DIGEST_NBYTES or blake3(body).digest() != content[:DIGEST_NBYTES]:
        raise invalid(name, "is torn: its digest is another one")
    return body


def write_manifest(manifest: VersionManifest) -> bytes:
    """Return the bytes of a manifest's object."""
    return with_digest(_encode_manifest(manifest).SerializeToString(deterministic=True))


def read_manifest(content: bytes) -> VersionManifest:
    """Read a manifest's object."""
    body = without_digest(content, "manifest")
    try:
        message = pb.VersionManifest.FromString(body)
    except DecodeError as error:
        raise invalid("manifest", f"is none: {error}") from error
    return _decode_manifest(message)
