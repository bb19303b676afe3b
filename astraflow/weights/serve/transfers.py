"""Transfers: of a version that is here, of one that arrives, of one that is still being made.

A speculative transfer begins while the next version is being made. Its chunks go out as they are
encoded, and the plan when the last one is: by then most of them have arrived. The reader verifies
them by the plan, and the plan by the root that the run registered.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from typing import Final

from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.assembly import UNPLANNED_COUNT, UNPLANNED_NBYTES
from astraflow.weights.heartbeat import with_heartbeats
from astraflow.weights.patches.routes import Link
from astraflow.weights.patches.store import PatchStore, VersionProgress
from astraflow.weights.patches.stored import PatchName, StoredPatch
from astraflow.weights.serve.relay import RelayPatch, WeightRelay
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk

# A source may have to encode a chunk again: that is done beside the event loop, some at a time.
_BATCH_COUNT: Final = 4

ChunkPlace = tuple[int, int]
"""Number of the patch in the plan, index of the chunk."""


PlannedPatch = StoredPatch | RelayPatch
"""A patch of a source, of which chunks may still be coming in."""

WeightSource = PatchStore | WeightRelay
"""What can be served: a publisher's store, or a relay."""


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
        incoming: WeightRelay | None,
    ) -> None:
        """Begin to keep what is needed.

        Args:
            store: Of the chunks.
            plan: What will be sent.
            places: Of the chunks, in order.
            incoming: The store, if chunks may still be coming in.
        """
        self.plan = plan
        self._store = store
        self._incoming = incoming
        self._places = places
        self._infos = [index.patch for index in plan.patches]
        self._held = ExitStack()
        self._held.enter_context(store.reading(self._infos))

    async def chunks(self) -> AsyncGenerator[SentChunk]:
        """Yield the chunks in order, each when it is there.

        Raises:
            AstraflowError: VERSION_EVICTED when a patch went meanwhile.
        """
        if self._incoming is not None:
            for each in self._places:
                await self._incoming.ready(self._infos[each[0]], each[1])
                yield self._take(each)
        elif all(map(self._store.is_at_hand, self._infos)):
            for each in self._places:
                yield self._take(each)
        else:
            for at in range(0, len(self._places), _BATCH_COUNT):
                batch = self._places[at : at + _BATCH_COUNT]
                for sent in await asyncio.to_thread(list, map(self._take, batch)):
                    yield sent

    def close(self) -> None:
        """Let go of what was kept; idempotent."""
        self._held.close()

    def _take(self, place: ChunkPlace) -> SentChunk:
        number, index = place
        return SentChunk(patch_index=number, chunk=self._store.chunk(self._infos[number], index))


def link_of(spec: TransferSpec) -> Link:
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


PlanFor = Callable[[Sequence[StoredPatch], Sequence[ChunkPlace]], TransferPlan]
"""Makes the plan of a transfer: its patches, and what is sent of them."""

OpenPublished = Callable[[TransferSpec], ServedTransfer]
"""Opens a transfer of a version that there is."""


class SpeculativeTransfer:
    """Sends the version after the newest one to a reader that holds the newest one."""

    def __init__(
        self,
        store: PatchStore,
        spec: TransferSpec,
        *,
        plan_for: PlanFor,
        open_published: OpenPublished,
    ) -> None:
        """Check what is wanted.

        Args:
            store: Of the versions.
            spec: What is wanted.
            plan_for: Makes plans.
            open_published: Goes on where nothing is sent ahead.

        Raises:
            AstraflowError: INVALID_FIELD; VERSION_UNKNOWN when it is not the next version.
        """
        _require_sound(spec)
        newest = store.history.newest
        if newest is None or spec.version > newest + 1:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"version {spec.version} does not come next here; the newest is {newest}",
                metadata={"version": str(spec.version)},
            )
        self._store = store
        self._in_progress = store.in_progress
        self._spec = spec
        self._plan_for = plan_for
        self._open_published = open_published
        self._sent_count = self._sent_nbytes = self._attempt = 0
        self._plan: TransferPlan | None = None

    @property
    def likely_nbytes(self) -> int:
        """Payload that it will have, as far as one can tell."""
        return self._in_progress.nbytes

    async def items(self) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield chunks as they are made, the plan as soon as it is known, then the other chunks.

        Raises:
            AstraflowError: VERSION_EVICTED when nothing leads from the base to the version, or no
                longer.
        """
        async with aclosing(self._made()) as made:
            async for item in made:
                yield item
        if self._is_done:
            return
        is_planned = self._plan is not None
        with closing(self._rest()) as rest:
            if not is_planned:
                yield rest.plan
            async with aclosing(rest.chunks()) as chunks:
                async for sent in chunks:
                    yield sent

    def close(self) -> None:
        """Return: what is held is held while `items` runs."""

    @property
    def _is_done(self) -> bool:
        return self._plan is not None and self._sent_count == self._plan.chunk_count

    async def _made(self) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield what is to be had while it is made, until the store has the version."""
        model_nbytes = self._store.history.shard_layout.payload_nbytes
        is_speculative = self._in_progress.is_for(self._link, model_nbytes)
        with self._in_progress.listening() as news:
            while not self._is_done:
                news.clear()
                look = self._progress()
                if is_speculative and look.patch is not None and self._plan is None:
                    yield self._planned(look.patch)
                elif (
                    is_speculative and look.chunk is not None and self._is_within_bounds(look.chunk)
                ):
                    self._sent_count += 1
                    self._sent_nbytes += len(look.chunk.payload)
                    yield SentChunk(patch_index=0, chunk=look.chunk)
                elif look.is_over:
                    return
                else:
                    await news.wait()

    def _progress(self) -> VersionProgress:
        look = self._in_progress.progress_of(self._spec.version, self._sent_count)
        if self._attempt and look.attempt and look.attempt != self._attempt:
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE,
                f"version {self._spec.version} failed and is made anew; ask for it again",
                retryable=True,
            )
        self._attempt = look.attempt or self._attempt
        return look

    def _is_within_bounds(self, chunk: Chunk) -> bool:
        """Whether a reader takes one more chunk: before the plan that is bounded."""
        nbytes, count = self._sent_nbytes + len(chunk.payload), self._sent_count + 1
        most = self._spec.max_memory_nbytes or UNPLANNED_NBYTES
        is_bounded = nbytes <= min(UNPLANNED_NBYTES, most) and count <= UNPLANNED_COUNT
        return self._plan is not None or is_bounded

    def _rest(self) -> ServedTransfer:
        """Open what was not sent: all of it, where nothing was."""
        if self._plan is None and not self._sent_count:
            return self._open_published(replace(self._spec, is_ahead=False))
        patch = self._store.find(self._name)
        plan = self._plan or self._planned(patch)
        return ServedTransfer(self._store, plan, _places(patch)[self._sent_count :], incoming=None)

    def _planned(self, patch: StoredPatch) -> TransferPlan:
        self._store.note(self._spec.version, self._spec.base_version, self._link)
        plan = self._plan_for((patch,), _places(patch))
        if 0 < self._spec.max_memory_nbytes < plan.payload_nbytes:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"version {plan.patches[0].patch.version} has {plan.payload_nbytes} bytes, which"
                " are too many to send before it is announced",
            )
        self._plan = plan
        return plan

    @property
    def _link(self) -> Link:
        return link_of(self._spec)

    @property
    def _name(self) -> PatchName:
        return PatchName(
            version=self._spec.version,
            base_version=self._spec.base_version,
            shard=self._store.history.shard_layout.shard,
        )


def _places(patch: StoredPatch) -> list[ChunkPlace]:
    return [(0, index) for index in range(patch.info.chunk_count)]


def _require_sound(spec: TransferSpec) -> None:
    if spec.base_version is None or spec.version != spec.base_version + 1:
        raise AstraflowError(
            Reason.INVALID_FIELD, "ahead leads from a version to the next one, no further"
        )
    if spec.ranges or spec.want_chunks or spec.have_chunks:
        raise AstraflowError(Reason.INVALID_FIELD, "ahead comes whole: name no ranges and chunks")


_UNKNOWN: Final = TransferPlan(transfer_id="", patches=(), chunk_count=0, payload_nbytes=0)


class IncomingTransfer:
    """Sends a version as it arrives; while nothing does, it says that it is there.

    Attributes:
        plan: Without patches: they are known once the version begins to arrive.
    """

    def __init__(
        self,
        store: WeightRelay,
        spec: TransferSpec,
        open_transfer: Callable[[TransferSpec], ServedTransfer],
    ) -> None:
        """Send nothing yet.

        Args:
            store: Where the version arrives.
            spec: What is wanted.
            open_transfer: Opens the transfer once there can be one.
        """
        self.plan = _UNKNOWN
        self.likely_nbytes = 0
        self._store = store
        self._spec = spec
        self._open_transfer = open_transfer

    async def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and its chunks, each when it is there; Waiting between them.

        Raises:
            AstraflowError: What `Pull` answers.
        """
        async with aclosing(with_heartbeats(self._relayed())) as items:
            async for item in items:
                yield item

    def close(self) -> None:
        """Return: what is held is held while `items` runs."""

    async def _relayed(self) -> AsyncGenerator[TransferPlan | SentChunk]:
        await self._store.expect(self._spec)
        with closing(self._open_transfer(self._spec)) as transfer:
            self.likely_nbytes = transfer.plan.payload_nbytes
            yield transfer.plan
            async with aclosing(transfer.chunks()) as chunks:
                async for sent in chunks:
                    yield sent
