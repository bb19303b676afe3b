"""The store: patches by what they lead from and to, and the cheapest way between two versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.versions import PatchInfo
from astraflow.wire.patches import PatchIndex
from astraflow.wire.weights import layout_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPatch:
    """A patch with its chunks."""

    index: PatchIndex
    chunks: tuple[Chunk, ...]

    @property
    def info(self) -> PatchInfo:
        """Names it."""
        return self.index.patch


class PatchStore:
    """Keeps the patches of the last versions of one policy; safe to use from any thread.

    A reader holds what it reads by reference, so evicting under it takes nothing from it.
    """

    def __init__(self, layout: Layout, *, keep: int) -> None:
        """Start empty.

        Args:
            layout: Of all versions.
            keep: Forward patches kept: a reader so many versions behind still finds its way.
        """
        self.layout = layout
        self.layout_digest = layout_digest(layout)
        self._keep = keep
        self._lock = Lock()
        self._forward: dict[int, StoredPatch] = {}
        self._full: dict[int, StoredPatch] = {}
        self._newest = -1

    def add(self, patches: Sequence[StoredPatch]) -> None:
        """Take the patches of the next version; those that are too old go."""
        with self._lock:
            for patch in patches:
                self._newest = max(self._newest, patch.info.version)
                shelf = self._full if patch.info.base_version is None else self._forward
                shelf[patch.info.version] = patch
            for version in [v for v in self._forward if v <= self._newest - self._keep]:
                del self._forward[version]
            # The one before the newest may be asked for by who learnt of it a moment ago.
            for version in [v for v in self._full if v < self._newest - 1]:
                del self._full[version]

    def plan(self, version: int, base_version: int | None) -> tuple[StoredPatch, ...]:
        """Return the patches of the fewest bytes that lead from the base to the version.

        Raises:
            AstraflowError: VERSION_UNKNOWN when it was never published, VERSION_EVICTED when
                nothing that is kept leads there.
        """
        with self._lock:
            if not 0 <= version <= self._newest:
                raise AstraflowError(
                    Reason.VERSION_UNKNOWN,
                    f"version {version} was never published; the newest is {self._newest}",
                )
            ways = [way for way in (self._chain(version, base_version),) if way is not None]
            if version in self._full:
                ways.append((self._full[version],))
        if not ways:
            raise AstraflowError(
                Reason.VERSION_EVICTED,
                f"version {version} can no longer be reached from {base_version}; pull the newest",
                metadata={"version": str(version)},
            )
        return min(ways, key=lambda way: sum(patch.info.payload_nbytes for patch in way))

    def _chain(self, version: int, base_version: int | None) -> tuple[StoredPatch, ...] | None:
        if base_version is None or base_version >= version:
            return None
        chain = [self._forward.get(each) for each in range(base_version + 1, version + 1)]
        found = tuple(patch for patch in chain if patch is not None)
        return found if len(found) == len(chain) else None

    def patch(self, root_digest: bytes) -> StoredPatch:
        """Return a patch by its root.

        Raises:
            AstraflowError: PATCH_UNKNOWN.
        """
        with self._lock:
            for shelf in (self._forward, self._full):
                for patch in shelf.values():
                    if patch.info.root_digest == root_digest:
                        return patch
        raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is kept here")
