"""Signs of life: a source that waits for what it passes on says so, and who waits for it listens.

A relay is silent for two reasons: it has stopped, or what feeds it has. Only the first is its
own fault, and only the receiver next to the fault should look for another source; otherwise all
below it would run to the origin at once. So a source with nothing to send says that it is there.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog

from astraflow.codec.chunks import chunk_invalid
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError
from astraflow.transport.frames import source_late
from astraflow.wire.transfers import SentItem, TransferPlan, Waiting
from astraflow.wire.weights import SentChunk

HEARTBEAT_S: Final = 0.25
"""A source says that it waits when it has sent nothing for so long."""

_ANSWERS: Final = 4
# Of a link that nobody has measured.
_GOODPUT_BYTES_PER_S: Final = 2e6
# Chunks differ in size; and of two one may be waited for by the other.
_CHUNKS: Final = 2

# Silence is waited for in so many looks: one that takes longer than it should stood still itself,
# and what came meanwhile is unread.
_POLL_COUNT: Final = 8

Item = TypeVar("Item")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Arrivals(Generic[Item]):
    """Waits for the next item with a limit; an item that was waited for in vain still comes."""

    def __init__(self, items: AsyncGenerator[Item]) -> None:
        self._items = items
        self._coming: asyncio.Future[Item] | None = None

    async def next(self, limit_s: float | None) -> Item | None:
        """Return the next item; None: it has not come. Raises StopAsyncIteration at the end."""
        coming = self._coming = self._coming or asyncio.ensure_future(anext(self._items))
        done, _ = await asyncio.wait([coming], timeout=limit_s)
        if not done:
            return None
        self._coming = None
        return coming.result()

    async def aclose(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            # Not awaited itself: its cancellation could not be told from one of who waits here.
            await asyncio.wait([coming])
            with suppress(asyncio.CancelledError, StopAsyncIteration, AstraflowError):
                coming.result()
        await self._items.aclose()


async def with_heartbeats(
    items: AsyncGenerator[Item], *, every_s: float = HEARTBEAT_S
) -> AsyncGenerator[Item | Waiting]:
    """Yield what comes, and Waiting whenever nothing has for so long."""
    async with aclosing(_Arrivals(items)) as arrivals:
        while True:
            try:
                item = await arrivals.next(every_s)
            except StopAsyncIteration:
                return
            yield Waiting() if item is None else item


async def watched(
    items: AsyncGenerator[SentItem], watch: "StallWatch"
) -> AsyncGenerator[TransferPlan | SentChunk]:
    async with aclosing(_Arrivals(items)) as arrivals:
        while True:
            look_s, started_s = watch.poll_s, watch.clock.monotonic()
            try:
                item = await arrivals.next(look_s)
            except StopAsyncIteration:
                return
            watch.waited(min(look_s, watch.clock.monotonic() - started_s))
            if item is not None:
                watch.note(item)
                if not isinstance(item, Waiting):
                    yield item
            elif watch.left_s > 0:
                continue
            elif watch.is_only:
                log.warning(
                    "a source is waited for, as there is no other", why=str(watch.stalled())
                )
                watch.restart()
            else:
                raise watch.stalled()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallTimeouts:
    """How long a source may be silent, while there is another one.

    Attributes:
        silent_s: Without any sign, at least; a source that is far or slow gets more.
        first_s: The same before the first sign of a source that was never asked.
        idle_s: With signs, but without a chunk.
    """

    silent_s: float = 1.0
    first_s: float = 1.5
    idle_s: float = 15.0


class StallWatch:
    """Notes what one source sends in one transfer, and says when it has stalled.

    That is the plan, and each of its chunks twice at most: a lane that broke and goes on elsewhere
    may send a chunk again; who sends true chunks without end is a liar all the same.

    Only time that was waited for it counts: not what its watcher does with a chunk, and not what
    he sleeps through.

    Attributes:
        answer_s: From a request to its first sign; 0: unknown.
        is_only: Whether there is no other source.
        since_s: What comes has been on its way since then, asked for ahead; None: it was not.
    """

    def __init__(
        self,
        address: str,
        timeouts: StallTimeouts,
        *,
        answer_s: float,
        goodput_bytes_per_s: float,
        is_only: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.answer_s = answer_s
        self.is_only = is_only
        self.since_s: float | None = None
        self._address = address
        self._timeouts = timeouts
        self._goodput = goodput_bytes_per_s or _GOODPUT_BYTES_PER_S
        self._chunk_nbytes = 0.0
        self._asked_s = self.clock.monotonic()
        self._signless_s = self._chunkless_s = 0.0
        self._is_answered = self._is_planned = False
        self._left = 1

    @property
    def left_s(self) -> float:
        """Seconds to be waited until it has stalled if nothing comes."""
        signless = self._silent_s - self._signless_s
        return max(0.0, min(signless, self._timeouts.idle_s - self._chunkless_s))

    @property
    def poll_s(self) -> float:
        return min(self.left_s, min(self._silent_s, self._timeouts.idle_s) / _POLL_COUNT)

    def waited(self, seconds: float) -> None:
        self._signless_s += seconds
        self._chunkless_s += seconds

    def restart(self) -> None:
        self._signless_s = self._chunkless_s = 0.0

    def note(self, item: SentItem) -> None:
        self._signless_s = 0.0
        if isinstance(item, Waiting) and item.since_s is not None:
            self.since_s, self._is_answered = item.since_s, True
        if not self._is_answered:
            self._is_answered, self.answer_s = True, self.clock.monotonic() - self._asked_s
        if isinstance(item, Waiting):
            return
        self._chunkless_s = 0.0
        self._left -= 1
        if self._left < 0:
            raise chunk_invalid("a source sends more than the chunks of its plan")
        if isinstance(item, TransferPlan):
            infos = [index.patch for index in item.patches]
            count = sum(info.chunk_count for info in infos)
            self._left += 0 if self._is_planned else 2 * count
            self._is_planned = True
            self._chunk_nbytes = sum(info.payload_nbytes for info in infos) / max(1, count)

    def stalled(self) -> AstraflowError:
        return source_late(
            f"{self._address} has stalled: no sign for {self._signless_s:.2f} s, no chunk for"
            f" {self._chunkless_s:.2f} s"
        )

    @property
    def _silent_s(self) -> float:
        if not self.answer_s:
            return self._timeouts.first_s
        chunk_s = _CHUNKS * self._chunk_nbytes / self._goodput
        return max(self._timeouts.silent_s, _ANSWERS * self.answer_s + chunk_s)
