"""Ahead: a transfer of the next version, which begins while that is still being made.

Its chunks go out as they are encoded, and the plan when the last one is: by then most of them have
arrived. The reader verifies them by the plan, and the plan by the root that the run registered.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace

from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.assembly import UNPLANNED_COUNT, UNPLANNED_NBYTES
from astraflow.weights.links import Link
from astraflow.weights.served import ChunkPlace, ServedTransfer, link_of
from astraflow.weights.store import PatchStore
from astraflow.weights.stored import PatchName, StoredPatch
from astraflow.weights.upcoming import Look
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import TransferPlan, TransferSpec

PlanFor = Callable[[Sequence[StoredPatch], Sequence[ChunkPlace]], TransferPlan]
"""Makes the plan of a transfer: its patches, and what is sent of them."""

OpenPublished = Callable[[TransferSpec], ServedTransfer]
"""Opens a transfer of a version that there is."""


class AheadTransfer:
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
        self._upcoming = store.upcoming
        self._spec = spec
        self._plan_for = plan_for
        self._open_published = open_published
        self._sent_count = self._sent_nbytes = self._attempt = 0
        self._plan: TransferPlan | None = None

    @property
    def likely_nbytes(self) -> int:
        """Payload that it will have, as far as one can tell."""
        return self._upcoming.nbytes

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
        is_early = self._upcoming.is_for(self._link, self._store.history.part.payload_nbytes)
        with self._upcoming.listening() as news:
            while not self._is_done:
                news.clear()
                look = self._look()
                if is_early and look.patch is not None and self._plan is None:
                    yield self._planned(look.patch)
                elif is_early and look.chunk is not None and self._has_room(look.chunk):
                    self._sent_count += 1
                    self._sent_nbytes += len(look.chunk.payload)
                    yield SentChunk(patch_index=0, chunk=look.chunk)
                elif look.is_over:
                    return
                else:
                    await news.wait()

    def _look(self) -> Look:
        look = self._upcoming.look(self._spec.version, self._sent_count)
        if self._attempt and look.attempt and look.attempt != self._attempt:
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE,
                f"version {self._spec.version} failed and is made anew; ask for it again",
                retryable=True,
            )
        self._attempt = look.attempt or self._attempt
        return look

    def _has_room(self, chunk: Chunk) -> bool:
        """Whether a reader takes one more chunk: before the plan that is bounded."""
        nbytes, count = self._sent_nbytes + len(chunk.payload), self._sent_count + 1
        is_bounded = nbytes <= UNPLANNED_NBYTES and count <= UNPLANNED_COUNT
        return self._plan is not None or is_bounded

    def _rest(self) -> ServedTransfer:
        """Open what was not sent: all of it, where nothing was."""
        if self._plan is None and not self._sent_count:
            return self._open_published(replace(self._spec, is_ahead=False))
        patch = self._store.find(self._name)
        plan = self._plan or self._planned(patch)
        return ServedTransfer(self._store, plan, _places(patch)[self._sent_count :], arriving=None)

    def _planned(self, patch: StoredPatch) -> TransferPlan:
        self._store.note(self._spec.version, self._spec.base_version, self._link)
        self._plan = self._plan_for((patch,), _places(patch))
        return self._plan

    @property
    def _link(self) -> Link:
        return link_of(self._spec)

    @property
    def _name(self) -> PatchName:
        return PatchName(
            version=self._spec.version,
            base_version=self._spec.base_version,
            shard=self._store.history.part.shard,
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
