"""A version's chunks from its sources: one after the other, or several at once.

Statistics say what each gave during one pull, and a memory keeps what was measured from one pull to
the next.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import SourceInfo, SourceKind, SourceReport, SourceState, VersionInfo
from astraflow.transport.frames import SourceError, source_lost
from astraflow.weights.fetch.lanes import ChunkLane, ListVersions, PullListener, joined
from astraflow.weights.heartbeat import StallTimeouts, StallWatch, watched
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk, layout_digest

# Shorter transfers say more about round trips than about the line.
_MEASURED_NBYTES: Final = 64 << 10


@dataclass(slots=True, kw_only=True, eq=False)
class MeasuredLink:
    """The way to one source, as it was measured last.

    Attributes:
        goodput_bytes_per_s: 0: never measured.
        answer_s: From a request to its first sign; 0: never asked.
        silent_until_s: Nothing came from it of late; by the monotonic clock.
    """

    goodput_bytes_per_s: float = 0.0
    answer_s: float = 0.0
    silent_until_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class SourceStats:
    """Counts what comes from a source in one pull.

    Attributes:
        nbytes: Payload received and verified.
        duration_s: Time in which it was asked.
        bad_chunk_count: Chunks, or lists of their digests, that were refused.
        failure: Of the last time that it was asked.
        since_s: When what came began to, where it was asked for ahead; None: it was not.
    """

    source: SourceInfo
    link: MeasuredLink
    nbytes: int = 0
    duration_s: float = 0.0
    bad_chunk_count: int = 0
    failure: AstraflowError | None = None
    since_s: float | None = None

    @property
    def address(self) -> str:
        return self.source.address

    def spend(self, started_s: float, nbytes: int) -> None:
        """Count the time since a transfer began, in which so much came, and measure."""
        duration_s = time.monotonic() - (self.since_s or started_s)
        self.duration_s += duration_s
        if nbytes >= _MEASURED_NBYTES and duration_s > 0:
            self.link.goodput_bytes_per_s = nbytes / duration_s


_RELAY_TIMEOUTS: Final = StallTimeouts()
_ORIGIN_TIMEOUTS: Final = StallTimeouts(silent_s=5.0, first_s=5.0)
# An object store sends nothing until it has read a large block; its lane notices when it hangs.
_STORE_TIMEOUTS: Final = StallTimeouts(silent_s=60.0, first_s=60.0, idle_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How long is waited, and for whom.

    Attributes:
        relay_timeouts: Of a relay, if there is another source; else it is only said that it stalls.
        origin_timeouts: Of an origin, which sends no heartbeats while it makes a chunk again.
        shared_nbytes: Payload from which on a second source is worth its round trip.
        avoided_s: A source from which nothing came comes after the others for so long.
    """

    relay_timeouts: StallTimeouts = _RELAY_TIMEOUTS
    origin_timeouts: StallTimeouts = _ORIGIN_TIMEOUTS
    shared_nbytes: int = 8 << 20
    avoided_s: float = 60.0


NO_WAY: Final = frozenset({Reason.VERSION_EVICTED, Reason.PATCH_UNKNOWN})
"""What a source answers that has no way from a base to a version."""

# What a helper takes at a time: enough to fill its line, little enough that nobody waits for it.
_BLOCK_S: Final = 0.25
_FIRST_BLOCK_COUNT: Final = 4


@dataclass(slots=True, kw_only=True, eq=False)
class _Shared:
    """What is shared among the sources of one way.

    Attributes:
        claimed: Asked of a helper: root and index.
        first: The transfer in order; ended once others have brought the rest, as it may stall.
    """

    incoming: IncomingVersion
    frame: ShardLayout
    claimed: set[tuple[bytes, int]] = field(default_factory=set[tuple[bytes, int]])
    first: asyncio.Task[AstraflowError | None] | None = None

    def claim(self, count: int) -> list[tuple[bytes, int]]:
        """Return the last chunks that are neither here nor claimed."""
        left = [each for each in self.incoming.missing() if each not in self.claimed]
        self.claimed.update(left[-count:])
        return left[-count:]


class Fetch:
    """Asks sources, best first. One that lied is not asked again; a cut is resumed elsewhere.

    All sources are gone through again as long as a round brings anything new, so that a transfer
    over a bad line ends, and one that gets nowhere ends too. The first source sends everything in
    order. Others as near as it, which have the version whole, meanwhile send blocks from the end,
    as many as their goodput allows; whatever is last on its way from either is taken.

    Attributes:
        tried: What came from those that were asked, the first one first.
    """

    def __init__(
        self,
        lane: ChunkLane,
        sources: Sequence[SourceStats],
        transfer_token: bytes,
        *,
        listeners: Sequence[PullListener],
        settings: FetchSettings,
        listed: ListVersions | None,
    ) -> None:
        # Keys alone: a set that knows its order.
        self.tried: dict[SourceStats, None] = {}
        self._listed = listed
        self._lane = lane
        self._token = transfer_token
        self._stats = sources
        self._listeners = listeners
        self._settings = settings
        self._failure = source_lost("the version has no source yet")

    def reports(self) -> tuple[SourceReport, ...]:
        return tuple(
            SourceReport(
                address=stats.address,
                nbytes=stats.nbytes,
                duration=timedelta(seconds=stats.duration_s),
                failure=stats.failure and stats.failure.to_failure(),
                bad_chunk_count=stats.bad_chunk_count,
            )
            for stats in self.tried
        )

    @property
    def origin(self) -> SourceStats | None:
        """The first source, if it is an origin that gave the version; else None."""
        first = next(iter(self.tried), None)
        is_origin = first is not None and first.source.kind is SourceKind.ORIGIN
        return first if first and is_origin and first.failure is None else None

    @property
    def is_barred(self) -> bool:
        """Whether an origin has answered that it has no way like the one asked for last."""
        return any(
            each.source.kind is SourceKind.ORIGIN and each.failure.reason in NO_WAY
            for each in self.tried
            if each.failure is not None
        )

    async def layout(self, digest: bytes) -> ShardLayout:
        for stats in self._honest():
            try:
                layout = await self._lane.get_layout(stats.address, digest, self._token)
                # Not before: one that is a lie may have more ranges than there is memory for.
                if layout_digest(layout) == digest:
                    return ShardLayout(layout)
                stats.bad_chunk_count += 1
                why = f"{stats.address} sent another layout than was asked for"
                self._note(stats, AstraflowError(Reason.DIGEST_MISMATCH, why))
            except AstraflowError as error:
                self._note(stats, error)
        raise self._failure

    async def chunks(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        """Return once every chunk of some way to the version is here, verified."""
        for each in self._listeners:
            each.begin(incoming, frame)
        while True:
            before = incoming.chunk_count
            for stats in self._honest():
                await self._from(stats, incoming, frame)
                if stats.failure and stats.since_s is not None and not stats.bad_chunk_count:
                    # What it sent ahead may never have become a version: ask for what has.
                    await self._from(stats, incoming, frame)
                if stats.failure is None:
                    return
            if incoming.chunk_count == before:
                raise self._failure

    def _honest(self) -> list[SourceStats]:
        return [stats for stats in self._stats if not stats.bad_chunk_count]

    async def _from(
        self, stats: SourceStats, incoming: IncomingVersion, frame: ShardLayout
    ) -> None:
        """Take from one source what is still missing, and let others help."""
        self.tried[stats] = None
        incoming.begin()
        shared = _Shared(incoming=incoming, frame=frame)
        async with asyncio.TaskGroup() as group:
            helpers: list[asyncio.Task[None]] = []

            def planned(plan: TransferPlan) -> None:
                if plan.payload_nbytes >= self._settings.shared_nbytes:
                    # As near as the first, and with all of the version.
                    first = stats.source.kind, SourceState.LIVE, stats.source.region
                    helpers.extend(
                        group.create_task(self._help(each, shared))
                        for each in self._honest()
                        if each is not stats
                        and (each.source.kind, each.source.state, each.source.region) == first
                    )

            goodput = stats.link.goodput_bytes_per_s
            spec = incoming.spec(goodput_bytes_per_s=goodput)
            first = group.create_task(self._stream(stats, spec, shared, planned))
            shared.first = first
            await asyncio.wait([first])
            for helper in helpers:
                helper.cancel()
        if first.cancelled() and not incoming.is_complete:
            self._note(stats, source_lost(f"the lane to {stats.address} was closed"))
        else:
            self._note(stats, None if first.cancelled() else first.result())

    async def _stream(
        self, stats: SourceStats, spec: TransferSpec, shared: _Shared, planned: Callable[..., None]
    ) -> AstraflowError | None:
        """Take everything in order; return why it ended before all was here."""
        incoming = shared.incoming
        started, before = time.monotonic(), stats.nbytes
        try:
            async with aclosing(self._items(stats, spec)) as items:
                async for item in items:
                    if isinstance(item, TransferPlan) and not incoming.is_registered(item):
                        # Of patches that a version has gained since. Without an answer the plan is
                        # refused, which says why.
                        with suppress(AstraflowError):
                            incoming.learn(await self._listed() if self._listed else ())
                    self._take(stats, item, shared)
                    if isinstance(item, TransferPlan):
                        planned(item)
                    elif incoming.is_complete:
                        break
            incoming.require_complete()
        except AstraflowError as error:
            return error
        finally:
            stats.spend(started, stats.nbytes - before)
        return None

    async def _help(self, stats: SourceStats, shared: _Shared) -> None:
        """Take blocks from the end until nothing is left, or the source fails."""
        count = _FIRST_BLOCK_COUNT
        while wanted := shared.claim(count):
            started, before = time.monotonic(), stats.nbytes
            try:
                await self._take_block(stats, wanted, shared)
            except AstraflowError as error:
                shared.claimed.difference_update(wanted)
                self._note(stats, error)
                return
            finally:
                # One that is not needed any more ends here, and may have given something.
                if stats.nbytes > before:
                    self.tried[stats] = None
                stats.spend(started, stats.nbytes - before)
            self._note(stats, None)
            if shared.incoming.is_complete and shared.first is not None:
                shared.first.cancel()
            # A line that has room gets more at a time.
            count = max(1, int(count * _BLOCK_S / max(time.monotonic() - started, 1e-3)))

    async def _take_block(
        self, stats: SourceStats, wanted: Sequence[tuple[bytes, int]], shared: _Shared
    ) -> None:
        spec = shared.incoming.spec(want=wanted, goodput_bytes_per_s=stats.link.goodput_bytes_per_s)
        async with aclosing(self._items(stats, spec)) as items:
            async for item in items:
                if not isinstance(item, TransferPlan):
                    self._take(stats, item, shared)
                elif not shared.incoming.is_planned_as(item):
                    raise AstraflowError(
                        Reason.PATCH_UNKNOWN, f"{stats.address} would go another way"
                    )
        came = shared.incoming.chunks
        if any(index not in came.get(root, ()) for root, index in wanted):
            raise source_lost(f"{stats.address} ended before the end")

    def _take(self, stats: SourceStats, item: TransferPlan | SentChunk, shared: _Shared) -> None:
        incoming = shared.incoming
        nbytes, bad = incoming.nbytes, incoming.bad_chunk_count
        try:
            is_stored = stats.source.kind is SourceKind.OBJECT_STORE
            incoming.take(item, shared.frame, is_stored=is_stored)
        finally:
            stats.nbytes += incoming.nbytes - nbytes
            stats.bad_chunk_count += incoming.bad_chunk_count - bad
        for each in self._listeners:
            each.note()

    async def _items(
        self, stats: SourceStats, spec: TransferSpec
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield what a source sends; one that stalls is left where there is another."""
        pulling, settings = self._lane.pull(stats.address, spec, self._token), self._settings
        timeouts = {
            SourceKind.RELAY: settings.relay_timeouts,
            SourceKind.ORIGIN: settings.origin_timeouts,
        }
        watch = StallWatch(
            stats.address,
            timeouts.get(stats.source.kind, _STORE_TIMEOUTS),
            answer_s=stats.link.answer_s,
            goodput_bytes_per_s=stats.link.goodput_bytes_per_s,
            is_only=self._honest()[-1] is stats,
        )
        try:
            async with aclosing(watched(pulling, watch)) as items:
                async for item in items:
                    yield item
        except AstraflowError as error:
            # What it answers is no lie; what no honest source sends is.
            if error.reason is Reason.CHUNK_INVALID and not isinstance(error, SourceError):
                stats.bad_chunk_count += 1
            raise
        finally:
            stats.link.answer_s, stats.since_s = watch.answer_s, watch.since_s

    def _note(self, stats: SourceStats, failure: AstraflowError | None) -> None:
        stats.failure = failure
        self._failure = failure or self._failure
        self.tried[stats] = None


_SILENT: Final = frozenset({Reason.SOURCE_UNREACHABLE, Reason.SOURCE_TIMEOUT})
_KEPT_LINKS: Final = 64


class SourceMemory:
    """Orders sources by who answered of late, and keeps what was measured of those asked last."""

    def __init__(self, kinds: Collection[SourceKind] | None, *, avoided_s: float) -> None:
        self._links: dict[str, MeasuredLink] = {}
        self._kinds = frozenset(SourceKind if kinds is None else kinds)
        self._avoided_s = avoided_s

    def ordered(self, target: VersionInfo) -> list[SourceStats]:
        """Return who is asked for a version; those that could not be reached of late come last."""
        asked = joined(each for each in target.sources if each.kind in self._kinds)
        first = {each.address: each for each in reversed(asked)}
        found = [
            SourceStats(source=first[address], link=self._links.get(address) or MeasuredLink())
            for address in dict.fromkeys(each.address for each in asked)
        ]
        now = time.monotonic()
        return sorted(found, key=lambda each: each.link.silent_until_s > now)

    def note(self, fetch: Fetch) -> None:
        for each in fetch.tried:
            if each.failure is not None and each.failure.reason in _SILENT and not each.nbytes:
                each.link.silent_until_s = time.monotonic() + self._avoided_s
            self._links.pop(each.address, None)
            self._links[each.address] = each.link
        while len(self._links) > _KEPT_LINKS:
            del self._links[next(iter(self._links))]
