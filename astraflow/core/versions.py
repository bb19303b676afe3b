"""Versions of weights: what exists, how to get it, who has it."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import MemberId, PolicyId

UNSOUND: Final = frozenset({Reason.DIGEST_MISMATCH, Reason.CHUNK_INVALID})
"""Why a pull ends when what came is not what the run registered."""


class CodecProfile(StrEnum):
    """How a patch is coded: quickly or small."""

    FAST = "fast"
    COMPACT = "compact"


class LaneKind(StrEnum):
    """A way for chunks to travel."""

    GRPC = "grpc"
    TCP = "tcp"
    UCX = "ucx"
    SHM = "shm"
    OBJECT_STORE = "object_store"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInfo:
    """Names one patch: what turns a base into a version; see `weights/v1/patch.proto`.

    Attributes:
        base_version: None: from nothing, every byte is in the patch.
        version: What it leads to.
        profile: How it is coded.
        codec_version: Of the byte format.
        root_digest: BLAKE3 over BLAKE3(shared tables), then the chunk digests by index.
        chunk_count: Chunks in it.
        payload_nbytes: Sum over the chunks, tables and headers excluded.
        shard_rank: Publisher's rank whose part of the layout it covers.
        shard_count: 1: the whole layout.
    """

    base_version: int | None
    version: int
    profile: CodecProfile
    codec_version: int
    root_digest: bytes
    chunk_count: int
    payload_nbytes: int
    shard_rank: int = 0
    shard_count: int = 1


class SourceKind(StrEnum):
    """What a source is."""

    ORIGIN = "origin"
    RELAY = "relay"
    OBJECT_STORE = "object_store"


class SourceState(StrEnum):
    """How much a source has."""

    PULLING = "pulling"
    LIVE = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """A place that has a version, or a part of it; see `weights/v1/version.proto`."""

    kind: SourceKind
    state: SourceState
    endpoint: str = ""
    uri: str = ""
    member_id: MemberId | None = None
    region: str = ""
    shard_rank: int = 0
    shard_count: int = 1
    goodput_bytes_per_s: float = 0.0

    @property
    def address(self) -> str:
        """Its endpoint, or its URI without one."""
        return self.endpoint or self.uri


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """What the run knows of one version; see `weights/v1/version.proto`.

    Attributes:
        policy_id: Whose weights.
        version: Grows by one per publication and is never used twice.
        layout_digest: BLAKE3 of the layout's canonical form.
        content_digest: State digest, 16 bytes: a keyed sum over (offset, bits).
        scrub_digest: BLAKE3 over the flat layout; empty between two scrubs.
        restored_from: Older version whose weights these are.
        step: Optimizer steps behind these weights.
        patches: What can be pulled, smallest first.
        sources: Who has it, best first.
        publish_time: Set by the run.
    """

    policy_id: PolicyId
    version: int
    layout_digest: bytes
    content_digest: bytes
    scrub_digest: bytes = b""
    restored_from: int | None = None
    step: int = 0
    patches: tuple[PatchInfo, ...]
    sources: tuple[SourceInfo, ...] = ()
    publish_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishAnswer:
    """What a RaaS may expect that asked for a version.

    Attributes:
        newest_version: None: none yet.
        is_pending: Whether one comes; False: the newest version has all steps.
    """

    newest_version: int | None
    is_pending: bool


class VersionState(StrEnum):
    """Where a version stands on one member."""

    PULLING = "pulling"
    STAGED = "staged"
    LIVE = "live"
    FAILED = "failed"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What one source gave during one update."""

    address: str
    nbytes: int
    duration: timedelta
    failure: Failure | None = None
    bad_chunk_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """Where a version stands on the caller; see ReportVersionRequest."""

    policy_id: PolicyId
    version: int
    state: VersionState
    failure: Failure | None = None
    base_version: int | None = None
    pull_duration: timedelta | None = None
    verify_duration: timedelta | None = None
    decode_duration: timedelta | None = None
    stage_duration: timedelta | None = None
    pause_duration: timedelta | None = None
    pulled_nbytes: int = 0
    reports: tuple[SourceReport, ...] = ()

    @property
    def is_unsound(self) -> bool:
        """Whether what came is not what the run registered."""
        return self.failure is not None and self.failure.reason in UNSOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEndpoint:
    """Where one rank of a trainer serves its weights: host:port."""

    rank: int
    endpoint: str
