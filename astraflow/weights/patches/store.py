"""The store: what can be had of the last versions, and of the one in progress.

Payloads are kept of the forward patches only, which undo versions as well. The chunks of all others
(whole versions, patches over several versions, other profiles) are made again when they are
asked for, from the versions that they lead between: the encoding is canonical.
"""

import asyncio
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

from astraflow.codec.chunks import Chunk, ChunkRange, Encoding
from astraflow.codec.encode import encode_chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.weights.patches.history import History
from astraflow.weights.patches.layout_frame import LayoutFrame
from astraflow.weights.patches.routes import Compact, Link
from astraflow.weights.patches.stored import PatchName, StoredPatch, Way, cheapest_way
from astraflow.wire.transfers import ChunkSet


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProgress:
    """What can be had of a version just now.

    Attributes:
        chunk: The one that was asked for; None: it is not made yet, or there is none.
        patch: The patch that the chunks are of; None: it is not known yet, or there is none.
        is_over: Whether nothing more comes this way: the store has what there is.
        attempt: Tells attempts to make the same version apart; 0: it is not being made.
    """

    attempt: int = 0
    chunk: Chunk | None = None
    patch: StoredPatch | None = None
    is_over: bool = False


class VersionInProgress:
    """Shows a version while it is made: one thread makes versions, any event loop listens.

    What it keeps is the newest forward patch, which its store keeps too. Listeners look when they
    have time, so nobody who is slow holds up who makes.

    Attributes:
        nbytes: Payload of the last patch: about what the next one will have.
        compact: What coding it compactly as well has cost.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.compact = Compact()
        self._version = -1
        self._attempt = 0
        self._chunks: list[Chunk] = []
        self._patch: StoredPatch | None = None
        self._is_over = True
        self._is_sparse = True
        self._lock = Lock()
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def listener_count(self) -> int:
        with self._lock:
            return len(self._listeners)

    # What the publisher says, in its thread.

    @contextmanager
    def making(self, version: int) -> Generator[None]:
        """Show a version from now on; what was not said of it by the end is in the store."""
        with self._lock:
            self._version, self._chunks, self._patch = version, [], None
            self._is_over = False
            self._attempt += 1
        try:
            yield
        finally:
            self._is_sparse = self._patch is not None or not self._chunks
            self._is_over = True
            self._notify()

    def add(self, chunk: Chunk) -> None:
        """Show the next chunk of the patch from the version before."""
        self._chunks.append(chunk)
        self._notify()

    def finish(self, patch: StoredPatch) -> None:
        self.nbytes, self._patch = patch.info.payload_nbytes, patch
        self._notify()

    # What those ask who stand ready, in their event loops.

    def is_for(self, link: Link, model_nbytes: int) -> bool:
        """Whether a reader has the next version sooner by what is made first.

        A compact patch is made after it, and where nearly all changes nothing may come of it.
        """
        gained_s = 0.0
        if link.goodput_bytes_per_s > 0:
            gained_s = link.gained_s(self.nbytes, model_nbytes, self.compact)
        return self._is_sparse and gained_s <= 0 and CodecProfile.FAST in link.choices()[0]

    def progress_of(self, version: int, index: int) -> VersionProgress:
        """Return what there is of a version, and its chunk with an index."""
        with self._lock:
            if self._version < version:
                return VersionProgress()
            if self._version > version:
                return VersionProgress(is_over=True)
            chunk = self._chunks[index] if index < len(self._chunks) else None
            return VersionProgress(
                attempt=self._attempt, chunk=chunk, patch=self._patch, is_over=self._is_over
            )

    @contextmanager
    def listening(self) -> Generator[asyncio.Event]:
        """Give an event that is set whenever there is more to see."""
        news = asyncio.Event()
        with self._lock:
            self._listeners[news] = asyncio.get_running_loop()
        try:
            yield news
        finally:
            with self._lock:
                del self._listeners[news]

    def _notify(self) -> None:
        with self._lock:
            listeners = [*self._listeners.items()]
        for news, loop in listeners:
            with suppress(RuntimeError):  # The loop was closed with all its listeners.
                loop.call_soon_threadsafe(news.set)


SPARE_NBYTES: Final = 64 << 20
_LINK_COUNT: Final = 16


class PatchStore:
    """Offers the patches of the last versions of one policy; safe to use from any thread.

    Attributes:
        frame: Of all versions.
        history: Which patches are made again from.
        keep: A reader so many versions behind still finds its way.
        upcoming: The version that is being made.
    """

    def __init__(
        self,
        frame: LayoutFrame,
        history: History,
        *,
        keep: int = 16,
        spare_nbytes: int = SPARE_NBYTES,
    ) -> None:
        """Start empty.

        Args:
            frame: Of all versions.
            history: Which patches are made again from.
            keep: A reader so many versions behind still finds its way.
            spare_nbytes: What forward patches may take in any case; else one whole version.
        """
        self.frame = frame
        self.history = history
        self.keep = keep
        self.in_progress = VersionInProgress()
        self._room_nbytes = max(history.shard_layout.payload_nbytes, spare_nbytes)
        self._lock = Lock()
        self._patches: dict[PatchName, StoredPatch] = {}
        self._requested: dict[int, None] = {}
        self._links: deque[Link] = deque(maxlen=_LINK_COUNT)

    def __contains__(self, name: PatchName) -> bool:
        with self._lock:
            return name in self._patches

    @property
    def nbytes(self) -> int:
        """Payload that is kept, and what else undoes old versions."""
        with self._lock:
            kept = [patch for patch in self._patches.values() if patch.chunks is not None]
        return max(sum(patch.info.payload_nbytes for patch in kept), self.history.undo_nbytes)

    @property
    def patches(self) -> tuple[StoredPatch, ...]:
        with self._lock:
            return (*self._patches.values(),)

    def is_sound(self) -> bool:
        """Whether all payloads that are kept are what their digests say; reads them."""
        return all(patch.is_sound() for patch in self.patches)

    @property
    def requested_spans(self) -> tuple[int, ...]:
        """How many versions readers were behind of late, the last one first."""
        with self._lock:
            return (*reversed(self._requested),)

    @property
    def links(self) -> tuple[Link, ...]:
        """What the last readers told of themselves."""
        with self._lock:
            return (*self._links,)

    def offer(self, patches: Sequence[StoredPatch]) -> None:
        """Offer patches; what has become too old goes."""
        with self._lock:
            self._patches |= {PatchName.of(patch.info): patch for patch in patches}
        self.history.forget(keep=self.keep, room_nbytes=self._room_nbytes)
        oldest = self.history.oldest or 0
        with self._lock:
            old = [n for n, each in self._patches.items() if each.oldest_version < oldest]
            for name in old:
                del self._patches[name]

    def is_reachable(self, version: int) -> bool:
        """Whether a way to a version from nothing costs at most two whole versions."""
        found = cheapest_way(self.patches, None, version, lambda each: each.info.payload_nbytes)
        return found is not None and found[0] <= 2 * self.history.shard_layout.payload_nbytes

    def plan(
        self,
        version: int,
        base_version: int | None,
        have: Mapping[bytes, ChunkSet] | None = None,
        *,
        link: Link | None = None,
    ) -> Way:
        """Return the patches that lead from the base to the version, the cheapest way for a link.

        Args:
            version: What is wanted.
            base_version: What the reader holds; None: nothing.
            have: Chunks that it has already, by root.
            link: What it told of itself; None: bytes alone count.

        Raises:
            AstraflowError: VERSION_UNKNOWN when it was never published; VERSION_EVICTED when the
                version, or the base, is no longer kept; PATCH_UNKNOWN when the base is newer, or
                nothing is coded in a profile that the reader takes.
        """
        self._require_possible(version, base_version)
        had, told = have or {}, link or Link()
        model_nbytes = self.history.shard_layout.payload_nbytes

        def cost(patch: StoredPatch) -> float:
            return told.cost(patch.info, patch.missing_nbytes(had.get(patch.root)), model_nbytes)

        patches = self.patches
        for profiles in told.choices():
            usable = [each for each in patches if each.info.profile in profiles]
            found = cheapest_way(usable, base_version, version, cost)
            if found is not None:
                self.note(version, base_version, told)
                return found[1]
        if cheapest_way(patches, base_version, version, cost) is not None:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"no way is coded {' or '.join(told.profiles)} here"
            )
        raise _evicted(version, base_version)

    def patch(self, root_digest: bytes) -> StoredPatch:
        """Return a patch by its root.

        Raises:
            AstraflowError: PATCH_UNKNOWN.
        """
        for patch in reversed(self.patches):
            if patch.root == root_digest:
                return patch
        raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is kept here")

    def find(self, name: PatchName) -> StoredPatch:
        """Return a patch by its name.

        Raises:
            AstraflowError: VERSION_EVICTED when it is not here, or no longer.
        """
        with self._lock:
            patch = self._patches.get(name)
        if patch is None:
            raise _evicted(name.version, name.base_version)
        return patch

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return one chunk, made again where it was not kept.

        Raises:
            AstraflowError: VERSION_EVICTED when the patch went meanwhile.
        """
        patch = self.find(PatchName.of(info))
        return self._made_again(patch, index) if patch.chunks is None else patch.chunks[index]

    def is_at_hand(self, info: PatchInfo) -> bool:
        """Whether no chunk of a patch has to be encoded again.

        Raises:
            AstraflowError: VERSION_EVICTED when the patch went meanwhile.
        """
        return self.find(PatchName.of(info)).chunks is not None

    @contextmanager
    def reading(self, infos: Sequence[PatchInfo]) -> Generator[None]:
        """Keep versions while patches between them are read: a lease, which the caller ends.

        What is kept for readers is bounded: at most as much again as without them.
        """
        oldest = [i.version if i.base_version is None else i.base_version for i in infos]
        with self.history.reading(oldest):
            yield

    def _made_again(self, patch: StoredPatch, index: int) -> Chunk:
        header, info = patch.headers[index], patch.info
        if header.encoding is Encoding.UNCHANGED:
            return Chunk(header=header)
        where = ChunkRange(offset=header.offset, nbytes=header.nbytes, dtype=header.dtype)
        base = None if info.base_version is None else self.history.bits_of(info.base_version)(where)
        chunk = encode_chunk(
            where,
            self.history.bits_of(info.version)(where),
            base,
            profile=info.profile,
            tables=patch.index.shared_tables,
        )
        return replace(chunk, header=header)

    def note(self, version: int, base_version: int | None, link: Link) -> None:
        """Note how far behind a reader is, and its link: others may be so, and it again."""
        with self._lock:
            if link.goodput_bytes_per_s > 0:
                self._links.append(link)
            if base_version is None or version - base_version < 2:
                return
            self._requested.pop(version - base_version, None)
            self._requested[version - base_version] = None

    def _require_possible(self, version: int, base_version: int | None) -> None:
        newest = -1 if self.history.newest is None else self.history.newest
        if not 0 <= version <= newest:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"version {version} was never published here; the newest is {newest}",
                metadata={"version": str(version)},
            )
        if base_version is not None and base_version >= version:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"no patch leads back from {base_version} to {version}"
            )


def _evicted(version: int, base_version: int | None) -> AstraflowError:
    start = "nothing" if base_version is None else f"version {base_version}"
    return AstraflowError(
        Reason.VERSION_EVICTED,
        f"what leads from {start} to version {version} is no longer kept; pull the newest",
        metadata={"version": str(version), "base_version": str(base_version)},
    )
