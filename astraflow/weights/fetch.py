"""Fetch: a version's chunks from its sources: one after the other, or several at once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import Source, SourceKind, SourceReport
from astraflow.weights.fetch_settings import FetchSettings
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming
from astraflow.weights.ports import Lane, ListVersions, Progress
from astraflow.weights.ration import Ration
from astraflow.weights.signs import watched
from astraflow.weights.tally import MeasuredLink, Tally
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import TransferPlan, TransferSpec

# What a helper takes at a time: enough to fill its line, little enough that nobody waits for it.
_BLOCK_S: Final = 0.25
_FIRST_BLOCK_COUNT: Final = 4


@dataclass(slots=True, kw_only=True, eq=False)
class _Shared:
    """What is shared among the sources of one way.

    Attributes:
        incoming: Where the chunks go.
        frame: Of the layout.
        claimed: Asked of a helper: root and index.
        first: The transfer in order; ended once others have brought the rest, as it may stall.
    """

    incoming: Incoming
    frame: Frame
    claimed: set[tuple[bytes, int]] = field(default_factory=set[tuple[bytes, int]])
    first: asyncio.Task[AstraflowError | None] | None = None

    def claim(self, count: int) -> list[tuple[bytes, int]]:
        """Return the last chunks that are neither here nor claimed."""
        left = [each for each in self.incoming.missing() if each not in self.claimed]
        self.claimed.update(left[-count:])
        return left[-count:]

    def unclaim(self, wanted: Sequence[tuple[bytes, int]]) -> None:
        """Let others have what did not come."""
        self.claimed.difference_update(wanted)


class Fetch:
    """Asks sources, best first. One that lied is not asked again; a cut is resumed elsewhere.

    All sources are gone through again as long as a round brings anything new, so that a transfer
    over a bad line ends, and one that gets nowhere ends too. The first source sends everything in
    order. Others as near as it, which have the version whole, meanwhile send blocks from the end,
    as many as their goodput allows; whatever is last on its way from either is taken.
    """

    def __init__(
        self,
        lane: Lane,
        sources: Sequence[Source],
        transfer_token: bytes,
        *,
        links: Mapping[str, MeasuredLink] | None = None,
        progress: Progress | None = None,
        settings: FetchSettings | None = None,
        listed: ListVersions | None = None,
    ) -> None:
        """Ask nobody yet.

        Args:
            lane: Over which chunks travel.
            sources: Best first.
            transfer_token: Of the run.
            links: Measured before, by address.
            progress: Is told what comes.
            settings: How long is waited.
            listed: Asked when a source names a patch that the run has not told of yet.
        """
        self._listed = listed
        self._lane = lane
        self._token = transfer_token
        known = links or {}
        first = {each.address: each for each in reversed(sources)}
        self._tallies = [
            Tally(source=first[address], link=known.get(address, MeasuredLink()))
            for address in dict.fromkeys(each.address for each in sources)
        ]
        self._tried: list[Tally] = []
        self._progress = progress
        self._settings = settings or FetchSettings()
        self._failure = AstraflowError(
            Reason.SOURCE_UNREACHABLE, "the version has no source yet", retryable=True
        )

    def reports(self) -> tuple[SourceReport, ...]:
        """Return one report per source that was asked."""
        return tuple(tally.report() for tally in self._tried)

    @property
    def origin(self) -> str | None:
        """Address of the first source, if it is an origin that gave the version; else None."""
        first = self._tried[0] if self._tried else None
        is_origin = first is not None and first.source.kind is SourceKind.ORIGIN
        return first.address if first and is_origin and first.failure is None else None

    def links(self) -> dict[str, MeasuredLink]:
        """Return what was measured, by address."""
        return {each.address: each.link for each in self._tried}

    async def layout(self, digest: bytes) -> Frame:
        """Return the layout with a digest.

        Raises:
            AstraflowError: The failure of the last source.
        """
        for tally in self._honest():
            try:
                frame = Frame(await self._lane.get_layout(tally.address, digest, self._token))
                if frame.digest == digest:
                    return frame
                tally.bad_chunk_count += 1
                self._note(tally, _other_layout(tally.address))
            except AstraflowError as error:
                self._note(tally, error)
        raise self._failure

    async def chunks(self, incoming: Incoming, frame: Frame) -> None:
        """Return once every chunk of some way to the version is here, verified.

        Raises:
            AstraflowError: The failure of the last source.
        """
        if self._progress is not None:
            self._progress.begin(incoming, frame)
        while True:
            before = incoming.chunk_count
            for tally in self._honest():
                await self._from(tally, incoming, frame)
                if tally.failed_ahead:
                    # What was made ahead may never have become a version: ask for what has.
                    await self._from(tally, incoming, frame)
                if tally.failure is None:
                    return
            if incoming.chunk_count == before:
                raise self._failure

    def _honest(self) -> list[Tally]:
        return [tally for tally in self._tallies if not tally.bad_chunk_count]

    async def _from(self, tally: Tally, incoming: Incoming, frame: Frame) -> None:
        """Take from one source what is still missing, and let others help."""
        self._ask(tally)
        incoming.begin()
        shared = _Shared(incoming=incoming, frame=frame)
        async with asyncio.TaskGroup() as group:
            helpers: list[asyncio.Task[None]] = []

            def planned(plan: TransferPlan) -> None:
                if plan.payload_nbytes >= self._settings.shared_nbytes:
                    helpers.extend(
                        group.create_task(self._help(each, shared))
                        for each in self._honest()
                        if each is not tally and each.is_beside(tally.source)
                    )

            goodput = tally.link.goodput_bytes_per_s
            spec = incoming.spec(goodput_bytes_per_s=goodput)
            first = group.create_task(self._stream(tally, spec, shared, planned))
            shared.first = first
            await asyncio.wait([first])
            for helper in helpers:
                helper.cancel()
        self._note(tally, None if first.cancelled() else first.result())

    async def _stream(
        self, tally: Tally, spec: TransferSpec, shared: _Shared, planned: Callable[..., None]
    ) -> AstraflowError | None:
        """Take everything in order; return why it ended before all was here."""
        incoming = shared.incoming
        started, before = time.monotonic(), tally.nbytes
        try:
            async with aclosing(self._items(tally, spec)) as items:
                async for item in items:
                    await self._know(item, incoming)
                    self._take(tally, item, shared)
                    if isinstance(item, TransferPlan):
                        planned(item)
                    elif incoming.is_complete:
                        break
            incoming.require_complete()
        except AstraflowError as error:
            return error
        finally:
            tally.spend(started, tally.nbytes - before)
        return None

    async def _know(self, item: TransferPlan | SentChunk, incoming: Incoming) -> None:
        """Ask the run about patches that a version has gained since it was told of."""
        if self._listed is None or not isinstance(item, TransferPlan):
            return
        if not incoming.is_registered(item):
            # Without an answer the plan is refused, which says why.
            with suppress(AstraflowError):
                incoming.learn(await self._listed())

    async def _help(self, tally: Tally, shared: _Shared) -> None:
        """Take blocks from the end until nothing is left, or the source fails."""
        count = _FIRST_BLOCK_COUNT
        while wanted := shared.claim(count):
            started, before = time.monotonic(), tally.nbytes
            try:
                await self._take_block(tally, wanted, shared)
            except AstraflowError as error:
                shared.unclaim(wanted)
                self._note(tally, error)
                return
            finally:
                # One that is not needed any more ends here, and may have given something.
                if tally.nbytes > before:
                    self._ask(tally)
                tally.spend(started, tally.nbytes - before)
            self._note(tally, None)
            if shared.incoming.is_complete and shared.first is not None:
                shared.first.cancel()
            # A line that has room gets more at a time.
            count = max(1, int(count * _BLOCK_S / max(time.monotonic() - started, 1e-3)))

    async def _take_block(
        self, tally: Tally, wanted: Sequence[tuple[bytes, int]], shared: _Shared
    ) -> None:
        spec = shared.incoming.spec(want=wanted, goodput_bytes_per_s=tally.link.goodput_bytes_per_s)
        async with aclosing(self._items(tally, spec)) as items:
            async for item in items:
                if not isinstance(item, TransferPlan):
                    self._take(tally, item, shared)
                elif not shared.incoming.is_planned_as(item):
                    raise AstraflowError(
                        Reason.PATCH_UNKNOWN, f"{tally.address} would go another way"
                    )
        if any(shared.incoming.is_missing(*each) for each in wanted):
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, f"{tally.address} ended before the end", retryable=True
            )

    def _take(self, tally: Tally, item: TransferPlan | SentChunk, shared: _Shared) -> None:
        incoming = shared.incoming
        nbytes, bad = incoming.nbytes, incoming.bad_chunk_count
        try:
            incoming.take(item, shared.frame)
        finally:
            tally.nbytes += incoming.nbytes - nbytes
            tally.bad_chunk_count += incoming.bad_chunk_count - bad
        if self._progress is not None:
            self._progress.note()

    async def _items(
        self, tally: Tally, spec: TransferSpec
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield what a source sends; one that stalls is left where there is another."""
        pulling = self._lane.pull(tally.address, spec, self._token)
        patience = self._settings.patience_with(tally.source.kind)
        watch = tally.watch(patience, is_only=self._honest()[-1] is tally)
        ration = Ration()
        try:
            async with aclosing(watched(pulling, watch)) as items:
                async for item in items:
                    ration.take(item)
                    yield item
        finally:
            tally.learn(watch)

    def _note(self, tally: Tally, failure: AstraflowError | None) -> None:
        tally.failure = failure
        self._failure = failure or self._failure
        self._ask(tally)

    def _ask(self, tally: Tally) -> None:
        if tally not in self._tried:
            self._tried.append(tally)


def _other_layout(address: str) -> AstraflowError:
    return AstraflowError(
        Reason.DIGEST_MISMATCH, f"{address} sent another layout than was asked for"
    )
