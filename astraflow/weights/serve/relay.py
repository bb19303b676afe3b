"""WeightRelay: serves the version that a puller pulls, while it arrives."""

import asyncio
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from astraflow.codec.chunks import Chunk
from astraflow.codec.encode import encode_whole, flat_bits
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layout_frame import LayoutFrame
from astraflow.weights.patches.routes import Link, steps
from astraflow.weights.patches.state import HeldState
from astraflow.weights.patches.stored import touches
from astraflow.wire.transfers import ChunkSet, TransferSpec
from astraflow.wire.weights import PatchIndex, digest_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelayPatch:
    """A patch of which some chunks may still be on their way.

    Attributes:
        index: Its digests.
        chunks: Those that are here; grows.
    """

    index: PatchIndex
    chunks: Mapping[int, Chunk]

    @property
    def info(self) -> PatchInfo:
        return self.index.patch

    @property
    def root(self) -> bytes:
        return self.index.patch.root_digest

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are here."""
        return len(self.chunks) == self.info.chunk_count

    @property
    def nbytes(self) -> int:
        """Payload that is here."""
        return sum(len(chunk.payload) for chunk in self.chunks.values())

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return what some chunks have at most: those on their way are counted by the whole."""
        if all(index in self.chunks for index in indexes):
            return sum(len(self.chunks[index].payload) for index in indexes)
        return self.info.payload_nbytes

    def touches(self, index: int, ranges: Sequence[range]) -> bool:
        """Whether a chunk may lie in one of some ranges, in bytes; none: it does."""
        chunk = self.chunks.get(index)
        return chunk is None or touches(chunk.header, ranges)


def relay_patches(incoming: IncomingVersion) -> dict[bytes, RelayPatch]:
    """Return the patches of a pull by their root digests; their chunks grow as they come."""
    return {
        index.patch.root_digest: RelayPatch(index=index, chunks=chunks)
        for index, chunks in incoming.planned_patches()
    }


def whole_patch(held: HeldState, info: PatchInfo) -> RelayPatch | None:
    """Return the whole patch of a state; None: its bytes are not those that were registered."""
    chunks = encode_whole(held.frame.runs, flat_bits(held.flat)).chunks
    index = PatchIndex(patch=info, chunk_digests=tuple(map(digest_of, chunks)))
    if index.root_digest != info.root_digest:
        return None
    return RelayPatch(index=index, chunks=dict(enumerate(chunks)))


KEPT_NBYTES: Final = 64 << 20
_KEPT_COUNT: Final = 64


class WeightRelay:
    """What one puller passes on of one policy."""

    def __init__(self, *, kept_nbytes: int = KEPT_NBYTES, wait_s: float = 5.0) -> None:
        """Start with nothing to pass on.

        Args:
            kept_nbytes: Of patches that have arrived; the newest is kept in any case.
            wait_s: How long a version may be asked for before its pull begins here.
        """
        self._kept_nbytes = kept_nbytes
        self._wait_s = wait_s
        self._patches: dict[bytes, RelayPatch] = {}
        self._incoming: IncomingVersion | None = None
        self._failed_version: int | None = None
        self._frame: LayoutFrame | None = None
        self._held: HeldState | None = None
        self._whole: RelayPatch | None = None
        self._whole_info: PatchInfo | None = None
        self._readers: Counter[bytes] = Counter()
        self._encoding = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def frame(self) -> LayoutFrame:
        """Of what is served.

        Raises:
            AstraflowError: LAYOUT_UNKNOWN before anything was pulled.
        """
        if self._frame is None:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "nothing has been pulled here yet")
        return self._frame

    # What the puller says.

    def begin(self, incoming: IncomingVersion, frame: LayoutFrame) -> None:
        """Pass on what a pull brings from now on."""
        if self._frame is not None and self._frame.digest != frame.digest:
            self.release()
            self._patches.clear()
        self._incoming, self._frame, self._failed_version = incoming, frame, None
        self.note()

    def note(self) -> None:
        """Look at what the pull has brought; who waits for it is woken."""
        coming = {} if self._incoming is None else relay_patches(self._incoming)
        if coming:
            self._forget_cut(coming)
        self._patches |= coming
        self._wake()

    def fail(self) -> None:
        """Give up the version that is being pulled: who waits for it is told."""
        self._failed_version = self._incoming and self._incoming.target.version
        self._incoming = None
        self._forget_cut({})
        self._wake()

    def release(self) -> None:
        """Stop to serve the whole version, because its state is about to be written to."""
        self._held = self._whole = self._whole_info = None

    def hold(self, held: HeldState, whole: PatchInfo | None) -> None:
        """Serve a version that is complete.

        Args:
            held: Not written to before `release`.
            whole: What the run registered as the patch from nothing; None: it did not.
        """
        self._incoming, self._held, self._whole_info = None, held, whole
        self._frame = held.frame
        self._trim()
        self._wake()

    # What the servicer asks.

    async def expect(self, spec: TransferSpec) -> None:
        """Return once it is known whether a version can be had here.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when its pull has not begun in time.
        """
        if spec.base_version is None:
            await self._encode_whole(spec.version)
        try:
            async with asyncio.timeout(self._wait_s):
                while self._is_to_come(spec):
                    await self._changed.wait()
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE,
                f"version {spec.version} has not begun to arrive here",
                retryable=True,
            ) from None

    async def ready(self, info: PatchInfo, index: int) -> None:
        """Return once a chunk is here.

        Raises:
            AstraflowError: VERSION_EVICTED when its patch is no longer to be had here.
        """
        while index not in self._find(info).chunks:
            await self._changed.wait()

    def plan(
        self,
        version: int,
        base_version: int | None,
        have: Mapping[bytes, ChunkSet] | None = None,
        *,
        link: Link | None = None,
    ) -> tuple[RelayPatch, ...]:
        """Return the patches that lead from the base to the version; see PatchStore.plan.

        Raises:
            AstraflowError: VERSION_EVICTED when they are not here.
        """
        del have, link
        way = self._way(version, base_version)
        if not way:
            raise _unavailable(version, base_version)
        return way

    def patch(self, root_digest: bytes) -> RelayPatch:
        """Return a patch by its root.

        Raises:
            AstraflowError: PATCH_UNKNOWN.
        """
        whole = self._whole
        if whole is not None and whole.root == root_digest:
            return whole
        patch = self._patches.get(root_digest)
        if patch is None:
            raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is here")
        return patch

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return a chunk that is here.

        Raises:
            AstraflowError: VERSION_EVICTED.
        """
        chunk = self._find(info).chunks.get(index)
        if chunk is None:
            raise _unavailable(info.version, info.base_version)
        if self._whole is not None and info.root_digest == self._whole.root:
            # Its payload lies in the held state, which the next version is written into.
            return replace(chunk, payload=bytes(chunk.payload))
        return chunk

    def is_at_hand(self, info: PatchInfo) -> bool:
        """Return True: what is here is never encoded again."""
        del info
        return True

    @contextmanager
    def reading(self, infos: Sequence[PatchInfo]) -> Generator[None]:
        """Keep patches while they are read."""
        roots = [info.root_digest for info in infos]
        self._readers.update(roots)
        try:
            yield
        finally:
            self._readers.subtract(roots)
            self._readers += Counter[bytes]()
            self._trim()

    def _trim(self) -> None:
        """Forget what is not read, not coming, and served otherwise, or too much."""
        if self._held is None:
            return
        room = self._kept_nbytes
        newest_first = sorted(self._patches.values(), key=lambda each: -each.info.version)
        for number, patch in enumerate(newest_first):
            # Many small ones cost time with every chunk that comes.
            room = room - patch.nbytes if number < _KEPT_COUNT else -1
            is_whole = patch.info.base_version is None
            is_old = patch.info.version < self._held.version
            is_done = patch.info.version <= self._held.version and not self._readers[patch.root]
            if is_done and (is_whole or (is_old and room < 0)):
                del self._patches[patch.root]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget_cut(self, coming: Mapping[bytes, RelayPatch]) -> None:
        """Forget the patches of which no more chunks come."""
        self._patches = {
            root: patch
            for root, patch in self._patches.items()
            if patch.is_complete or root in coming
        }

    def _find(self, info: PatchInfo) -> RelayPatch:
        try:
            return self.patch(info.root_digest)
        except AstraflowError:
            raise _unavailable(info.version, info.base_version) from None

    def _is_to_come(self, spec: TransferSpec) -> bool:
        if spec.version == self._failed_version or self._way(spec.version, spec.base_version):
            return False
        if self._incoming is not None and self._incoming.target.version == spec.version:
            # The plan tells whether it starts where the asker does.
            return not list(self._incoming.planned_patches())
        return self._held is None or self._held.version < spec.version

    def _way(self, version: int, base_version: int | None) -> tuple[RelayPatch, ...]:
        """Return a chain of patches; empty: there is none."""
        whole = self._whole
        if whole is not None and base_version is None and whole.info.version == version:
            return (whole,)
        ways: dict[int | None, tuple[RelayPatch, ...]] = {base_version: ()}
        for step in steps(self._patches.values(), lambda each: each.info):
            start = ways.get(step.base_version)
            if start is not None:
                ways.setdefault(step.version, (*start, *step.patches))
        return ways.get(version, ())

    async def _encode_whole(self, version: int) -> None:
        """Make the patch from nothing to the held version, when that is asked for."""
        async with self._encoding:
            held, info = self._held, self._whole_info
            if held is None or info is None or held.version != version or self._whole is not None:
                return
            whole = await asyncio.to_thread(whole_patch, held, info)
            if held is self._held:
                self._whole = whole


def _unavailable(version: int, base_version: int | None) -> AstraflowError:
    start = "nothing" if base_version is None else f"version {base_version}"
    return AstraflowError(
        Reason.VERSION_EVICTED,
        f"what leads from {start} to version {version} is not here; ask another source",
        metadata={"version": str(version), "base_version": str(base_version)},
    )
