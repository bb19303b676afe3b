"""WeightRelay: serves the version that a puller pulls, while it arrives."""

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from astraflow.codec.chunks import Chunk
from astraflow.codec.encode import encode_whole, flat_bits
from astraflow.core.versions import PatchInfo
from astraflow.transport.frames import source_lost
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch, Way, evicted
from astraflow.weights.patches.routes import cheapest_way, steps
from astraflow.weights.patches.state import HeldState
from astraflow.wire.transfers import TransferSpec
from astraflow.wire.weights import PatchIndex, digest_of


def whole_patch(held: HeldState, info: PatchInfo) -> Patch | None:
    """Return the whole patch of a state; None: its bytes are not those that were registered."""
    chunks = encode_whole(held.frame, flat_bits(held.flat))
    index = PatchIndex(patch=info, chunk_digests=tuple(map(digest_of, chunks)))
    if index.root_digest != info.root_digest:
        return None
    return Patch(index, dict(enumerate(chunks)))


_KEPT_NBYTES: Final = 64 << 20
_KEPT_COUNT: Final = 64
_ELSEWHERE: Final = "is not here; ask another source"


class WeightRelay:
    """What one puller passes on of one policy.

    Attributes:
        frame: Of what is served; None: nothing was pulled yet.
    """

    def __init__(self, *, wait_s: float = 5.0) -> None:
        self._wait_s = wait_s
        self._patches: dict[bytes, Patch] = {}
        self._incoming: IncomingVersion | None = None
        self._planned: tuple[Patch, ...] = ()
        self._failed_version: int | None = None
        self.frame: ShardLayout | None = None
        self._held: HeldState | None = None
        self._whole: Patch | None = None
        self._whole_info: PatchInfo | None = None
        self._readers: Counter[bytes] = Counter()
        self._encoding = asyncio.Lock()
        self._changed = asyncio.Event()

    # What the puller says.

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        if self.frame is not None and self.frame.digest != frame.digest:
            self.release()
            self._patches.clear()
        self._incoming, self.frame, self._failed_version = incoming, frame, None
        self._planned = ()
        self._wake()

    def note(self) -> None:
        """Look whether the pull has a plan now; its patches grow by themselves."""
        planned = () if self._incoming is None else self._incoming.planned
        if not planned or planned is self._planned:
            return
        self._planned = planned
        kept = {root: each for root, each in self._patches.items() if each.failure is None}
        self._patches = kept | {each.root: each for each in planned}
        self._wake()

    def fail(self) -> None:
        """Give up the version that is being pulled: who waits for it is told."""
        if self._incoming is not None:
            target = self._incoming.target
            self._failed_version = target.version
            self._incoming.fail(evicted(target.version, self._incoming.base_version, _ELSEWHERE))
        self._incoming = None
        self._patches = {root: p for root, p in self._patches.items() if p.failure is None}
        self._wake()

    @property
    def is_state_read(self) -> bool:
        """Whether somebody reads a patch from nothing, whose payloads are the state's own bytes."""
        return any(self._readers[root] for root, each in self._patches.items() if _is_whole(each))

    def release(self, *, is_written: bool = True) -> None:
        """Stop to serve the version that is held; and, if it is written to, what lies in it."""
        if self._whole is not None:
            self._whole.fail(evicted(self._whole.info.version, None, _ELSEWHERE))
        self._held = self._whole = self._whole_info = None
        if is_written:
            kept = self._patches.items()
            self._patches = {r: each for r, each in kept if self._readers[r] or not _is_whole(each)}

    def hold(self, held: HeldState, whole: PatchInfo | None) -> None:
        self._incoming, self._held, self._whole_info = None, held, whole
        self.frame = held.frame
        self._trim()
        self._wake()

    # What the servicer asks.

    async def expect(self, spec: TransferSpec) -> None:
        """Return once it is known whether a version can be had here, or SOURCE_UNREACHABLE."""
        if spec.base_version is None:
            async with self._encoding:
                held, info = self._held, self._whole_info
                if held and info and held.version == spec.version and self._whole is None:
                    whole = await asyncio.to_thread(whole_patch, held, info)
                    if held is self._held:
                        self._whole = whole
        try:
            async with asyncio.timeout(self._wait_s):
                while self._is_to_come(spec):
                    await self._changed.wait()
        except TimeoutError:
            raise source_lost(f"version {spec.version} has not begun to arrive here") from None

    def plan(self, spec: TransferSpec) -> Way:
        """Return the patches that lead from the base to the version; see PatchStore.plan."""
        way = self._way(spec)
        if not way:
            raise evicted(spec.version, spec.base_version, _ELSEWHERE)
        return way

    async def chunk(self, patch: Patch, index: int) -> Chunk:
        chunk = await patch.chunk(index)
        if _is_whole(patch):
            # Its payload may lie in the state, which the next version is written into.
            return replace(chunk, payload=bytes(chunk.payload))
        return chunk

    @contextmanager
    def reading(self, infos: Sequence[PatchInfo]) -> Generator[None]:
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
        room = _KEPT_NBYTES
        newest_first = sorted(self._patches.values(), key=lambda each: -each.info.version)
        for number, patch in enumerate(newest_first):
            # Many small ones cost time with every chunk that comes.
            nbytes = sum(len(chunk.payload) for chunk in patch.chunks.values())
            room = room - nbytes if number < _KEPT_COUNT else -1
            is_old = patch.info.version < self._held.version
            is_done = patch.info.version <= self._held.version and not self._readers[patch.root]
            if is_done and (_is_whole(patch) or (is_old and room < 0)):
                del self._patches[patch.root]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_to_come(self, spec: TransferSpec) -> bool:
        if spec.version == self._failed_version or self._way(spec):
            return False
        if self._incoming is not None and self._incoming.target.version == spec.version:
            # The plan tells whether it starts where the asker does.
            return not self._incoming.planned
        return self._held is None or self._held.version < spec.version

    def _way(self, spec: TransferSpec) -> Way:
        whole = self._whole
        if whole is not None and spec.base_version is None and whole.info.version == spec.version:
            return (whole,)
        known = {each.info: each for each in self._patches.values()}
        found = cheapest_way(
            steps(known), spec.base_version, spec.version, lambda info: info.payload_nbytes
        )
        return () if found is None else tuple(known[info] for info in found[1])


def _is_whole(patch: Patch) -> bool:
    return patch.info.base_version is None
