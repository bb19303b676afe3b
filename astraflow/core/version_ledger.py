"""The versions of one policy: numbered without a gap, each with one digest for ever."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import PatchInfo, VersionInfo


class VersionLedger:
    """What was published, the newest of it listed."""

    def __init__(self, policy_id: PolicyId, *, kept_count: int) -> None:
        self._policy_id = policy_id
        self._kept_count = kept_count
        self._infos: dict[int, VersionInfo] = {}
        self._next = 0
        self._shown = -1

    @property
    def next_version(self) -> int:
        """What the next publication must be numbered."""
        return self._next

    @property
    def newest(self) -> VersionInfo | None:
        """The last publication."""
        return self._infos[self._next - 1] if self._next else None

    @property
    def newest_version(self) -> int:
        """Its number; -1: none."""
        return self._next - 1

    @property
    def shown_version(self) -> int:
        """Newest version that the pool may see; -1: none."""
        return self._shown

    @property
    def listed(self) -> tuple[VersionInfo, ...]:
        """What can be pulled, oldest first."""
        return tuple(info for info in self._infos.values() if info.version <= self._shown)

    def show(self, version: int) -> tuple[VersionInfo, ...]:
        """Let the pool see versions up to one; return those that it did not see before."""
        fresh = range(self._shown + 1, min(version, self.newest_version) + 1)
        self._shown = max(self._shown, version)
        return tuple(self._infos[number] for number in fresh if number in self._infos)

    def get(self, version: int) -> VersionInfo:
        """Return one version.

        Raises:
            AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED.
        """
        if not 0 <= version < self._next:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} has no version {version} yet"
            )
        if version not in self._infos:
            raise AstraflowError(
                Reason.VERSION_EVICTED,
                f"version {version} of {self._policy_id} is no longer listed; "
                f"the oldest is {next(iter(self._infos))}",
            )
        return self._infos[version]

    def publish(self, info: VersionInfo, now: datetime) -> bool:
        """Enter a version; a repeat with more patches or object stores adds them.

        Returns:
            Whether anything changed.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT, LAYOUT_MISMATCH.
        """
        if info.version < self._next:
            return self._repeat(info)
        if info.version != self._next:
            raise AstraflowError(
                Reason.VERSION_NOT_NEXT,
                f"{self._policy_id} publishes version {self._next} next, not {info.version}",
            )
        newest = self.newest
        if newest is not None and newest.layout_digest != info.layout_digest:
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH,
                f"version {info.version} of {self._policy_id} has another layout than version "
                f"{newest.version}; start a new run for another model",
            )
        self._infos[info.version] = replace(info, publish_time=now)
        self._next += 1
        while len(self._infos) > self._kept_count:
            del self._infos[next(iter(self._infos))]
        return True

    def _repeat(self, info: VersionInfo) -> bool:
        known = self.get(info.version)
        if known.content_digest != info.content_digest:
            raise AstraflowError(
                Reason.REQUEST_CONFLICT,
                f"version {info.version} of {self._policy_id} has another content already",
            )
        patches = merge_patches(known.patches, info.patches)
        sources = tuple(dict.fromkeys((*known.sources, *info.sources)))
        if (patches, sources) == (known.patches, known.sources):
            return False
        self._infos[info.version] = replace(known, patches=patches, sources=sources)
        return True


def merge_patches(
    known: tuple[PatchInfo, ...], more: tuple[PatchInfo, ...]
) -> tuple[PatchInfo, ...]:
    """Return both, smallest first; a patch is known by base, profile and shard."""
    merged: Mapping[object, PatchInfo] = {
        (p.base_version, p.profile, p.shard_rank, p.shard_count): p for p in (*more, *known)
    }
    return tuple(sorted(merged.values(), key=lambda patch: patch.payload_nbytes))
