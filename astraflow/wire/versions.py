"""astraflow.weights.v1: versions, who has them, how they come to be live or lie in a store."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkHeader
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.versions import (
    PatchInfo,
    SourceInfo,
    SourceKind,
    SourceReport,
    SourceState,
    VersionInfo,
    VersionReport,
    VersionState,
    WeightEndpoint,
)
from astraflow.wire.common import decode_failure, encode_failure
from astraflow.wire.fields import (
    EnumTable,
    at_least,
    decode_span,
    encode_span,
    invalid,
    optional,
    optional_span,
    optional_time,
    required,
    set_span,
    set_time,
)
from astraflow.wire.weights import (
    DIGEST_NBYTES,
    STATE_DIGEST_NBYTES,
    PatchIndex,
    decode_chunk_header,
    decode_patch_index,
    decode_patch_info,
    encode_chunk_header,
    encode_patch_index,
    encode_patch_info,
)
from astraflow_proto.weights.v1 import object_store_pb2 as pb
from astraflow_proto.weights.v1 import version_pb2, version_service_pb2

SOURCE_KINDS = EnumTable(SourceKind, version_pb2.SourceKind, "SOURCE_KIND")

SOURCE_STATES = EnumTable(SourceState, version_pb2.SourceState, "SOURCE_STATE")

VERSION_STATES = EnumTable(VersionState, version_pb2.VersionState, "VERSION_STATE")


def encode_source(source: SourceInfo) -> version_pb2.Source:
    return version_pb2.Source(
        kind=SOURCE_KINDS.encode(source.kind),
        state=SOURCE_STATES.encode(source.state),
        endpoint=source.endpoint,
        uri=source.uri,
        member_id=source.member_id or "",
        region=source.region,
        shard_rank=source.shard_rank,
        shard_count=source.shard_count,
        goodput_bytes_per_s=source.goodput_bytes_per_s,
    )


def decode_source(message: version_pb2.Source) -> SourceInfo:
    """Read a Source.

    Raises:
        AstraflowError: INVALID_FIELD without the address that its kind needs.
    """
    kind = SOURCE_KINDS.decode(message.kind)
    is_object_store = kind is SourceKind.OBJECT_STORE
    required(message.uri if is_object_store else message.endpoint, "endpoint")
    return SourceInfo(
        kind=kind,
        state=SOURCE_STATES.decode(message.state),
        endpoint=message.endpoint,
        uri=message.uri,
        member_id=MemberId(message.member_id) if message.member_id else None,
        region=message.region,
        shard_rank=message.shard_rank,
        shard_count=message.shard_count,
        goodput_bytes_per_s=message.goodput_bytes_per_s,
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


def encode_version_info(info: VersionInfo) -> version_pb2.VersionInfo:
    message = version_pb2.VersionInfo(
        policy_id=info.policy_id,
        version=info.version,
        layout_digest=info.layout_digest,
        content_digest=info.content_digest,
        scrub_digest=info.scrub_digest,
        restored_from=info.restored_from,
        step=info.step,
        patches=map(encode_patch_info, info.patches),
        sources=map(encode_source, info.sources),
    )
    set_time(message.publish_time, info.publish_time)
    return message


def decode_version_info(message: version_pb2.VersionInfo) -> VersionInfo:
    """Read a VersionInfo.

    Raises:
        AstraflowError: INVALID_FIELD for digests of another size, or patches that lead elsewhere.
    """
    if len(message.layout_digest) != DIGEST_NBYTES:
        raise invalid("layout_digest", f"needs {DIGEST_NBYTES} bytes")
    if len(message.content_digest) != STATE_DIGEST_NBYTES:
        raise invalid("content_digest", f"needs {STATE_DIGEST_NBYTES} bytes")
    if len(message.scrub_digest) not in (0, DIGEST_NBYTES):
        raise invalid("scrub_digest", f"needs {DIGEST_NBYTES} bytes, or none")
    patches = tuple(map(decode_patch_info, message.patches))
    if any(patch.version != message.version for patch in patches):
        raise invalid("patches", f"one does not lead to version {message.version}")
    return VersionInfo(
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=at_least(message.version, 0, "version"),
        layout_digest=message.layout_digest,
        content_digest=message.content_digest,
        scrub_digest=message.scrub_digest,
        restored_from=optional(message, "restored_from"),
        step=at_least(message.step, 0, "step"),
        patches=patches,
        sources=tuple(map(decode_source, message.sources)),
        publish_time=optional_time(message, "publish_time"),
    )


def encode_version_report(report: VersionReport) -> version_service_pb2.ReportVersionRequest:
    message = version_service_pb2.ReportVersionRequest(
        policy_id=report.policy_id,
        version=report.version,
        state=VERSION_STATES.encode(report.state),
        failure=None if report.failure is None else encode_failure(report.failure),
        base_version=report.base_version,
        pulled_nbytes=report.pulled_nbytes,
        reports=map(_encode_source_report, report.reports),
    )
    set_span(message.pull_duration, report.pull_duration)
    set_span(message.verify_duration, report.verify_duration)
    set_span(message.decode_duration, report.decode_duration)
    set_span(message.stage_duration, report.stage_duration)
    set_span(message.pause_duration, report.pause_duration)
    return message


def decode_version_report(message: version_service_pb2.ReportVersionRequest) -> VersionReport:
    return VersionReport(
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=at_least(message.version, 0, "version"),
        state=VERSION_STATES.decode(message.state),
        failure=decode_failure(message.failure) if message.HasField("failure") else None,
        base_version=optional(message, "base_version"),
        pull_duration=optional_span(message, "pull_duration"),
        verify_duration=optional_span(message, "verify_duration"),
        decode_duration=optional_span(message, "decode_duration"),
        stage_duration=optional_span(message, "stage_duration"),
        pause_duration=optional_span(message, "pause_duration"),
        pulled_nbytes=at_least(message.pulled_nbytes, 0, "pulled_nbytes"),
        reports=tuple(map(_decode_source_report, message.reports)),
    )


def _encode_source_report(report: SourceReport) -> version_pb2.SourceReport:
    return version_pb2.SourceReport(
        address=report.address,
        nbytes=report.nbytes,
        duration=encode_span(report.duration),
        failure=None if report.failure is None else encode_failure(report.failure),
        bad_chunk_count=report.bad_chunk_count,
    )


def _decode_source_report(message: version_pb2.SourceReport) -> SourceReport:
    return SourceReport(
        address=message.address,
        nbytes=message.nbytes,
        duration=decode_span(message.duration),
        failure=decode_failure(message.failure) if message.HasField("failure") else None,
        bad_chunk_count=message.bad_chunk_count,
    )


def encode_weight_endpoint(endpoint: WeightEndpoint) -> version_pb2.WeightEndpoint:
    return version_pb2.WeightEndpoint(rank=endpoint.rank, endpoint=endpoint.endpoint)


def decode_weight_endpoint(message: version_pb2.WeightEndpoint) -> WeightEndpoint:
    """Read a WeightEndpoint.

    Raises:
        AstraflowError: INVALID_FIELD without an address.
    """
    return WeightEndpoint(
        rank=at_least(message.rank, 0, "rank"), endpoint=required(message.endpoint, "endpoint")
    )


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
