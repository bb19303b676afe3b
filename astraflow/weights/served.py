"""Served: one transfer of a store's chunks, over whichever lane."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final, Protocol, runtime_checkable

from astraflow.codec.chunks import Chunk
from astraflow.core.versions import PatchInfo
from astraflow.weights.frame import Frame
from astraflow.weights.links import Link
from astraflow.wire.patches import PatchIndex, SentChunk
from astraflow.wire.transfers import ChunkSet, TransferPlan, TransferSpec

# A source may have to encode a chunk again: that is done beside the event loop, some at a time.
_BATCH_COUNT: Final = 4

ChunkPlace = tuple[int, int]
"""Number of the patch in the plan, index of the chunk."""


class PlannedPatch(Protocol):
    """A patch of a source, of which chunks may still be coming in."""

    @property
    def index(self) -> PatchIndex:
        """Its digests."""
        ...

    @property
    def info(self) -> PatchInfo:
        """Names it."""
        ...

    @property
    def root(self) -> bytes:
        """Its root digest."""
        ...

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return the payload of some chunks, at most."""
        ...

    def touches(self, index: int, ranges: Sequence[range]) -> bool:
        """Whether a chunk may lie in one of some ranges."""
        ...


class WeightSource(Protocol):
    """What can be served: a publisher's store, or a relay."""

    @property
    def frame(self) -> Frame:
        """Of all versions.

        Raises:
            AstraflowError: LAYOUT_UNKNOWN when there is none yet.
        """
        ...

    def plan(
        self,
        version: int,
        base_version: int | None,
        have: Mapping[bytes, ChunkSet] | None = None,
        *,
        link: Link | None = None,
    ) -> Sequence[PlannedPatch]:
        """Return the patches that lead from the base to the version, best for a link."""
        ...

    def patch(self, root_digest: bytes) -> PlannedPatch:
        """Return a patch by its root."""
        ...

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return one chunk."""
        ...

    def is_at_hand(self, info: PatchInfo) -> bool:
        """Whether no chunk of a patch has to be encoded again."""
        ...

    def reading(self, infos: Sequence[PatchInfo]) -> AbstractContextManager[None]:
        """Keep what is read a little longer."""
        ...


@runtime_checkable
class Arriving(Protocol):
    """A source whose chunks are still coming in."""

    async def expect(self, spec: TransferSpec) -> None:
        """Return once it is known whether a version can be had."""
        ...

    async def ready(self, info: PatchInfo, index: int) -> None:
        """Return once a chunk can be had."""
        ...


class ServedTransfer:
    """Sends the chunks of a plan; what they need is kept until it is closed.

    Attributes:
        plan: What will be sent.
    """

    def __init__(
        self,
        store: WeightSource,
        plan: TransferPlan,
        places: Sequence[ChunkPlace],
        *,
        arriving: Arriving | None,
    ) -> None:
        """Begin to keep what is needed.

        Args:
            store: Of the chunks.
            plan: What will be sent.
            places: Of the chunks, in order.
            arriving: The store, if chunks may still be coming in.
        """
        self.plan = plan
        self._store = store
        self._arriving = arriving
        self._places = places
        self._infos = [index.patch for index in plan.patches]
        self._held = ExitStack()
        self._held.enter_context(store.reading(self._infos))

    async def chunks(self) -> AsyncGenerator[SentChunk]:
        """Yield the chunks in order, each when it is there.

        Raises:
            AstraflowError: VERSION_EVICTED when a patch went meanwhile.
        """
        if self._arriving is not None:
            for each in self._places:
                await self._arriving.ready(self._infos[each[0]], each[1])
                yield self._take(each)
        elif all(map(self._store.is_at_hand, self._infos)):
            for each in self._places:
                yield self._take(each)
        else:
            for at in range(0, len(self._places), _BATCH_COUNT):
                batch = self._places[at : at + _BATCH_COUNT]
                for sent in await asyncio.to_thread(self._take_all, batch):
                    yield sent

    def close(self) -> None:
        """Let go of what was kept; idempotent."""
        self._held.close()

    def _take_all(self, places: Sequence[ChunkPlace]) -> list[SentChunk]:
        return [self._take(each) for each in places]

    def _take(self, place: ChunkPlace) -> SentChunk:
        number, index = place
        return SentChunk(patch_index=number, chunk=self._store.chunk(self._infos[number], index))


def link_of(spec: TransferSpec) -> Link:
    """Return what a puller tells of itself."""
    return Link(
        profiles=spec.profiles,
        goodput_bytes_per_s=spec.goodput_bytes_per_s,
        core_count=spec.core_count,
    )


def wanted_chunks(patches: Sequence[PlannedPatch], spec: TransferSpec) -> list[ChunkPlace]:
    """Return the chunks that a puller wants and does not have, in order."""
    want = {chunks.root_digest: chunks for chunks in spec.want_chunks}
    have = {chunks.root_digest: chunks for chunks in spec.have_chunks}
    return [
        (number, index)
        for number, patch in enumerate(patches)
        for index in range(patch.info.chunk_count)
        if (not want or index in want.get(patch.root, ()))
        and index not in have.get(patch.root, ())
        and patch.touches(index, spec.ranges)
    ]
