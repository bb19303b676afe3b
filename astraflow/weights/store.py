"""The store: what is kept of the last versions, and the cheapest way between two of them.

What it keeps is bounded. Forward patches: the last K, and never more bytes than one whole
version (64 MiB for small ones), because a longer chain is of no use to anybody. Whole versions:
the newest; older ones while they fit into 64 MiB, or while a reader is at it, one at most.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final

from astraflow.codec.chunks import Chunk, ChunkHeader
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo
from astraflow.weights.frame import Frame
from astraflow.wire.patches import ChunkSet, PatchIndex

SPARE_NBYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPatch:
    """A patch with its chunks."""

    index: PatchIndex
    chunks: tuple[Chunk, ...]

    @property
    def info(self) -> PatchInfo:
        """Names it."""
        return self.index.patch

    @property
    def root(self) -> bytes:
        """Its root digest."""
        return self.index.patch.root_digest

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return the payload of some chunks."""
        return sum(len(self.chunks[index].payload) for index in indexes)

    def touches(self, index: int, ranges: Sequence[range]) -> bool:
        """Whether a chunk lies in one of some ranges, in bytes; none: it does."""
        return touches(self.chunks[index].header, ranges)

    def missing_nbytes(self, have: ChunkSet | None) -> int:
        """Return the payload of the chunks that a reader does not have."""
        if have is None:
            return self.info.payload_nbytes
        return sum(len(c.payload) for n, c in enumerate(self.chunks) if n not in have)


Way = tuple[StoredPatch, ...]


class PatchStore:
    """Keeps the patches of the last versions of one policy; safe to use from any thread."""

    def __init__(self, frame: Frame, *, keep: int, spare_nbytes: int = SPARE_NBYTES) -> None:
        """Start empty.

        Args:
            frame: Of all versions.
            keep: Forward patches kept: a reader so many versions behind still finds its way.
            spare_nbytes: What may be kept beyond what is needed.
        """
        self.frame = frame
        self._keep = keep
        self._spare_nbytes = spare_nbytes
        self._lock = Lock()
        self._forward: dict[int, StoredPatch] = {}
        self._whole: dict[int, StoredPatch] = {}
        self._by_root: dict[bytes, StoredPatch] = {}
        self._readers: Counter[bytes] = Counter()
        self._newest = -1

    @property
    def nbytes(self) -> int:
        """Payload that is kept."""
        with self._lock:
            return sum(patch.info.payload_nbytes for patch in self._by_root.values())

    def add(self, patches: Sequence[StoredPatch]) -> None:
        """Take the patches of the next version; those that are too old or too many go."""
        with self._lock:
            for patch in patches:
                self._newest = max(self._newest, patch.info.version)
                shelf = self._whole if patch.info.base_version is None else self._forward
                shelf[patch.info.version] = patch
            self._trim_forward()
            self._trim_whole()
            kept = (*self._forward.values(), *self._whole.values())
            self._by_root = {patch.root: patch for patch in kept}

    def plan(
        self, version: int, base_version: int | None, have: Mapping[bytes, ChunkSet] | None = None
    ) -> Way:
        """Return the patches that lead from the base to the version.

        Args:
            version: What is wanted.
            base_version: What the reader holds; None: nothing, and then the way of the fewest
                bytes that it does not have.
            have: Chunks that it has already, by root.

        Raises:
            AstraflowError: VERSION_UNKNOWN when it was never published; VERSION_EVICTED when the
                version, or the base, is no longer kept; PATCH_UNKNOWN when the base is newer.
        """
        with self._lock:
            self._require_possible(version, base_version)
            wholes = [self._whole[v] for v in self._whole if v <= version]
            starts = wholes if base_version is None else [None]
            ways = [way for start in starts if (way := self._way(version, base_version, start))]
        if not ways:
            raise _evicted(version, base_version)
        had = have or {}
        return min(ways, key=lambda way: sum(p.missing_nbytes(had.get(p.root)) for p in way))

    def patch(self, root_digest: bytes) -> StoredPatch:
        """Return a patch by its root.

        Raises:
            AstraflowError: PATCH_UNKNOWN.
        """
        with self._lock:
            patch = self._by_root.get(root_digest)
        if patch is None:
            raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is kept here")
        return patch

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return one chunk; who sends holds no other reference to a patch for long.

        Raises:
            AstraflowError: VERSION_EVICTED when the patch went meanwhile.
        """
        with self._lock:
            patch = self._by_root.get(info.root_digest)
        if patch is None:
            raise _evicted(info.version, info.base_version)
        return patch.chunks[index]

    @contextmanager
    def reading(self, infos: Sequence[PatchInfo]) -> Generator[None]:
        """Keep whole versions a little longer while they are read."""
        roots = [info.root_digest for info in infos]
        with self._lock:
            self._readers.update(roots)
        try:
            yield
        finally:
            with self._lock:
                self._readers.subtract(roots)
                self._readers += Counter[bytes]()

    def _require_possible(self, version: int, base_version: int | None) -> None:
        if not 0 <= version <= self._newest:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"version {version} was never published here; the newest is {self._newest}",
                metadata={"version": str(version)},
            )
        if base_version is not None and base_version >= version:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"no patch leads back from {base_version} to {version}"
            )

    def _way(self, version: int, base: int | None, start: StoredPatch | None) -> Way:
        """Return the chain on top of a whole version, or of the base; empty: there is none."""
        first = base if start is None else start.info.version
        if first is None:
            return ()
        chain = [self._forward.get(each) for each in range(first + 1, version + 1)]
        found = tuple(patch for patch in chain if patch is not None)
        if len(found) < len(chain):
            return ()
        return found if start is None else (start, *found)

    def _trim_forward(self) -> None:
        room = max(self.frame.layout.nbytes, self._spare_nbytes)
        for version in sorted(self._forward, reverse=True):
            room -= self._forward[version].info.payload_nbytes
            if version <= self._newest - self._keep or room < 0:
                room = -1
                del self._forward[version]

    def _trim_whole(self) -> None:
        room, is_read = self._spare_nbytes, False
        for version in sorted(self._whole, reverse=True):
            patch = self._whole[version]
            if version == self._newest:
                continue
            if patch.info.payload_nbytes <= room and version > self._newest - self._keep:
                room -= patch.info.payload_nbytes
            elif self._readers[patch.root] and not is_read:
                is_read = True
            else:
                del self._whole[version]


def touches(header: ChunkHeader, ranges: Sequence[range]) -> bool:
    """Whether a chunk lies in one of some ranges, in bytes; none: it does."""
    return not ranges or any(
        each.start < header.end and header.offset < each.stop for each in ranges
    )


def _evicted(version: int, base_version: int | None) -> AstraflowError:
    start = "nothing" if base_version is None else f"version {base_version}"
    return AstraflowError(
        Reason.VERSION_EVICTED,
        f"what leads from {start} to version {version} is no longer kept; pull the newest",
        metadata={"version": str(version), "base_version": str(base_version)},
    )
