"""Versions of weights: what exists, how to get it, who has it, and how those did who gave it.

Versions of a policy are numbered without a gap, each with one digest for ever.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from astraflow.core.errors import AstraflowError, Failure, Reason
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
        signature: Ed25519, 64 bytes, by the signing key of the version; empty: not signed.
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
    signature: bytes = b""


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
        signing_key: Ed25519 public key, 32 bytes, that signed every patch; empty: none did.
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
    signing_key: bytes = b""


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


class VersionLedger:
    """What was published, the newest of it listed.

    Staleness is counted in versions that changed the weights. A trainer that comes back publishes
    its weights again, and a step of gradients of zero leaves them as they are: neither makes
    samples older.

    Example:
        Version 6 has the weights of version 5. Of versions 4 to 7 the numbers that count are 4, 5,
        5 and 6: for version 7 a sample of version 5 is one version old, and so is one of 6.

    Attributes:
        next_version: What the next publication must be numbered.
        shown_version: Newest version that the pool may see; -1: none.
    """

    # Versions that have the weights of the one before. Not set by the constructor, so that
    # snapshots of releases that did not know of them are read.
    _repeats: tuple[int, ...] = ()

    def __init__(self, policy_id: PolicyId, *, kept_count: int) -> None:
        self._policy_id = policy_id
        self._kept_count = kept_count
        self._infos: dict[int, VersionInfo] = {}
        self.next_version = 0
        self.shown_version = -1

    @property
    def newest(self) -> VersionInfo | None:
        return self._infos.get(self.next_version - 1)

    @property
    def newest_version(self) -> int:
        """Its number; -1: none."""
        return self.next_version - 1

    @property
    def listed(self) -> tuple[VersionInfo, ...]:
        """What can be pulled, oldest first."""
        return tuple(info for info in self._infos.values() if info.version <= self.shown_version)

    def show(self, version: int) -> tuple[VersionInfo, ...]:
        """Let the pool see versions up to one; return those that it did not see before."""
        fresh = range(self.shown_version + 1, min(version + 1, self.next_version))
        self.shown_version = max(self.shown_version, version)
        return tuple(self._infos[number] for number in fresh if number in self._infos)

    def get(self, version: int) -> VersionInfo:
        """Return one version.

        Raises:
            AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED.
        """
        if not 0 <= version < self.next_version:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} has no version {version} yet"
            )
        if version not in self._infos:
            raise AstraflowError(
                Reason.VERSION_EVICTED,
                f"version {version} of {self._policy_id} is no longer listed; "
                f"the oldest is {next(iter(self._infos))}",
                metadata={"version": str(version)},
            )
        return self._infos[version]

    def weights_number(self, version: int) -> int:
        """Return what of a version's number counts; versions to come are taken to have others."""
        return version - bisect_right(self._repeats, version)

    def oldest_with(self, weights_number: int) -> int:
        """Return the oldest version of weights of this number, or later ones."""
        repeats = range(len(self._repeats))
        passed = bisect_right(repeats, weights_number, key=lambda i: self._repeats[i] - i)
        return weights_number + passed

    def publish(self, info: VersionInfo, now: datetime) -> bool:
        """Enter a version; a repeat with more patches or object stores adds them.

        Returns:
            Whether anything changed.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT, LAYOUT_MISMATCH.
        """
        if info.version < self.next_version:
            return self._repeat(info)
        if info.version != self.next_version:
            raise AstraflowError(
                Reason.VERSION_NOT_NEXT,
                f"{self._policy_id} publishes version {self.next_version} next, not {info.version}",
                metadata={"next_version": str(self.next_version)},
            )
        newest = self.newest
        if newest is not None and newest.layout_digest != info.layout_digest:
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH,
                f"version {info.version} of {self._policy_id} has another layout than version "
                f"{newest.version}; start a new run for another model",
            )
        if newest is not None and newest.content_digest == info.content_digest:
            self._repeats += (info.version,)
        self._infos[info.version] = replace(info, publish_time=now)
        self.next_version += 1
        while len(self._infos) > self._kept_count:
            del self._infos[next(iter(self._infos))]
        return True

    def _repeat(self, info: VersionInfo) -> bool:
        known = self.get(info.version)
        if known.content_digest != info.content_digest or known.signing_key != info.signing_key:
            what = "content" if known.content_digest != info.content_digest else "signing key"
            raise AstraflowError(
                Reason.REQUEST_CONFLICT,
                f"version {info.version} of {self._policy_id} has another {what} already",
            )
        # A patch is known by base, profile and shard.
        merged: Mapping[object, PatchInfo] = {
            (p.base_version, p.profile, p.shard_rank, p.shard_count): p
            for p in (*info.patches, *known.patches)
        }
        patches = tuple(sorted(merged.values(), key=lambda patch: patch.payload_nbytes))
        sources = tuple(dict.fromkeys((*known.sources, *info.sources)))
        if (patches, sources) == (known.patches, known.sources):
            return False
        self._infos[info.version] = replace(known, patches=patches, sources=sources)
        return True


_KEPT: Final = 1024

# Shorter transfers say more about round trips than about the line.
_MEASURED_NBYTES: Final = 64 << 10

_NEWEST_SHARE: Final = 0.5

_WITNESS_COUNT: Final = 2


class SourceRecord:
    """What receivers said of sources, by address; the oldest is forgotten first.

    One receiver's word counts for itself: who lies about sources bars nobody else from them.
    From two receivers on a source is avoided by all.
    """

    def __init__(self) -> None:
        self._goodputs: dict[tuple[str, str], float] = {}
        self._witnesses: dict[str, set[MemberId]] = {}
        self._stalled: dict[str, set[MemberId]] = {}

    def note(self, member_id: MemberId, region: str, reports: Iterable[SourceReport]) -> None:
        for report in reports:
            seconds = report.duration.total_seconds()
            if report.nbytes >= _MEASURED_NBYTES and seconds > 0:
                key, goodput = (report.address, region), report.nbytes / seconds
                before = self._goodputs.pop(key, goodput)
                self._goodputs[key] = before + _NEWEST_SHARE * (goodput - before)
            if report.bad_chunk_count:
                self._witnesses.setdefault(report.address, set()).add(member_id)
            if report.failure is not None and report.failure.reason is Reason.SOURCE_TIMEOUT:
                self._stalled.setdefault(report.address, set()).add(member_id)
            kept: dict[Any, Any]
            # One at a time: to take many from the front of a dict takes the square of it.
            for kept in (self._goodputs, self._witnesses, self._stalled):
                if len(kept) > _KEPT:
                    del kept[next(iter(kept))]

    def note_alive(self, address: str) -> None:
        """Take a sign of life of a source: it has stalled no longer."""
        self._stalled.pop(address, None)

    @property
    def stalled(self) -> frozenset[str]:
        """Addresses that have stalled for two receivers and are silent since."""
        return frozenset(
            address for address, seen in self._stalled.items() if len(seen) >= _WITNESS_COUNT
        )

    def has_stalled(self, address: str, member_id: MemberId | None = None) -> bool:
        """Whether a source has stalled for the caller, or two others, and is silent since."""
        seen = self._stalled.get(address, ())
        return member_id in seen or len(seen) >= _WITNESS_COUNT

    def goodput_bytes_per_s(self, address: str, region: str) -> float:
        """Return the moving mean towards a region; 0: never measured."""
        return self._goodputs.get((address, region), 0.0)

    def is_avoided(self, address: str, member_id: MemberId | None) -> bool:
        """Whether a source has lied to the caller, or to two others."""
        seen = self._witnesses.get(address, ())
        return member_id in seen or len(seen) >= _WITNESS_COUNT
