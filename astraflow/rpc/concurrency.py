"""Asyncio for every floor: an outbox for one reader, coroutines side by side, retries."""

import asyncio
import math
import random
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Final, Generic, TypeVar, cast

from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError


def interruption() -> asyncio.Event:
    """Return what SIGINT and SIGTERM set from now on, in place of ending the process."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


Item = TypeVar("Item")
Result = TypeVar("Result")


class Outbox(Generic[Item]):
    """Items on their way to one reader, in order.

    A reader that waits is woken once for all that was put in one turn of the event loop, so
    a thousand items cost one wake-up. Items that nobody has taken stay for the next reader.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._clear_count = 0
        self.put_count = 0
        """Items that were put in so far."""
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add one item; a closed outbox forgets it."""
        if not self._is_closed:
            self._items.append(item)
            self.put_count += 1
            if self._waiter is not None:
                self._wake(self._waiter)

    def clear(self) -> list[Item]:
        """Forget what was not delivered, and return what nobody has taken of it."""
        left, self._items = self._items, []
        self._clear_count += 1
        return left

    def reset(self, items: Iterable[Item]) -> None:
        """Forget what was not delivered; `items` wait instead."""
        self.clear()
        for item in items:
            self.put(item)

    def close(self, error: Exception | None = None) -> None:
        """End it: the reader gets what is left, then the error, or nothing for ever."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            if self._waiter is not None:
                self._wake(self._waiter)

    async def take(self) -> list[Item]:
        """Return all that is there, at least one item; empty when it was closed.

        Raises:
            Exception: The one that it was closed with.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return []
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                # A reader that is on its way out must not take the next one's place.
                if self._waiter is waiter:
                    self._waiter = None
        items, self._items = self._items, []
        return items

    async def deliver(self, write: Callable[[Item], Awaitable[None]]) -> None:
        """Write items as they come, until it is closed.

        An item whose `write` did not return counts as not delivered; it and those after it
        wait for the next reader, unless the outbox was cleared in between.

        Raises:
            Exception: The one that it was closed with.
        """
        while items := await self.take():
            clear_count, delivered = self._clear_count, 0
            try:
                for item in items:
                    await write(item)
                    delivered += 1
            finally:
                if clear_count == self._clear_count and delivered < len(items):
                    self._items[:0] = items[delivered:]
                    if self._waiter is not None:
                        self._wake(self._waiter)

    def _wake(self, waiter: "asyncio.Future[None]") -> None:
        self._waiter = None
        if not waiter.done():
            waiter.set_result(None)


# Python's own is 5 ms.
_SWITCH_S: Final = 0.0005


def switch_threads_soon() -> None:
    """Let a thread that waits for the interpreter have it soon, in all of this process.

    Beside one that computes, an answer that needs it ten times would wait for 50 ms.
    """
    sys.setswitchinterval(_SWITCH_S)


# The limit for a peer that others hear from.
_MOST_TIMES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts: they double, and differ so that peers do not come in step.

    Attributes:
        first_s: Before the second attempt, at most.
        limit_s: Before any attempt, at most.
    """

    first_s: float = 0.05
    limit_s: float = 2.0

    def pause_s(self, attempt: int) -> float:
        """Return the pause after so many failed attempts, at least half of what it may be."""
        longest = min(self.limit_s, self.first_s * 2 ** min(attempt - 1, 16))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


@dataclass(slots=True)
class Liveness:
    """When a peer last showed that it works; shared by all who speak with it."""

    heard_s: float = -math.inf


class Retry:
    """Knows since when a caller fails, and says when it was enough.

    A peer that comes and goes is borne as long as it shows in between that it works, to whichever
    caller that shares its liveness. A call that fails for ever beside others that do not is borne
    ten times as long as a peer that is away.

    Example:
        `while True: try: return await call() except ... as error: await retry.pause(error)`
    """

    def __init__(
        self,
        limit_s: float,
        *,
        backoff: Backoff | None = None,
        clock: Clock | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        """Start fresh; failures without a success between them may go on for `limit_s`."""
        self._limit_s = limit_s
        self._backoff = backoff or Backoff()
        self._clock = clock or SystemClock()
        self._liveness = liveness or Liveness()
        self._failed_since: float | None = None
        self._attempts = 0
        self._deaf_s = 0.0

    def reset(self) -> None:
        self._failed_since = None
        self._attempts = 0
        self._deaf_s = 0.0
        self._liveness.heard_s = self._clock.monotonic()

    async def pause(self, error: AstraflowError, *, is_away: bool = False) -> None:
        """Wait before the next attempt.

        Args:
            error: What failed.
            is_away: Whether the peer could not be reached: then what counts is the time since
                anybody heard from it.

        Raises:
            AstraflowError: `error`, when the limit has passed.
        """
        now = self._clock.monotonic()
        if self._failed_since is None:
            self._failed_since = now
        self._attempts += 1
        end_s = self._failed_since + self._limit_s
        if is_away:
            longest = self._failed_since + _MOST_TIMES * self._limit_s
            end_s = min(longest, max(end_s, self._liveness.heard_s + self._limit_s))
        left_s = end_s + self._deaf_s - now
        if left_s <= 0:
            raise error
        pause_s = min(left_s, self._backoff.pause_s(self._attempts))
        await asyncio.sleep(pause_s)
        # A process that stood still meanwhile could not hear anybody.
        self._deaf_s += max(0.0, self._clock.monotonic() - now - pause_s)


def in_own_thread(call: Callable[[], Result], *, name: str) -> asyncio.Future[Result]:
    """Make a call that blocks in a thread of its own; return what becomes of it.

    One that hangs cannot be ended. Here it keeps no thread of the event loop's few from other work,
    nor the process from its end.
    """
    loop, context = asyncio.get_running_loop(), copy_context()
    answer: asyncio.Future[Result] = loop.create_future()

    def resolve(outcome: Callable[[], None]) -> None:
        if not answer.done():
            outcome()

    def work() -> None:
        try:
            outcome = partial(answer.set_result, context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            outcome = partial(answer.set_exception, error)
        # Of a loop that is closed nobody waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, outcome)

    Thread(target=work, name=name, daemon=True).start()
    return answer


# Of the process itself: what it reads, decodes and writes.
_OWN_THREADS: Final = 32


def reserve_threads(count: int) -> None:
    """Let so many calls of `asyncio.to_thread` block at once, and others have threads beside them.

    By itself the event loop has four threads more than the machine has cores, for all.
    """
    pool = ThreadPoolExecutor(count + _OWN_THREADS, thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(pool)


async def to_the_end(work: Awaitable[Result]) -> Result:
    """Return what work does, which goes on to its end when the caller gives up waiting for it.

    Raises:
        CancelledError: The caller was cancelled; the work is done or failed.
    """
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        # Nobody else asks what it raised.
        _ = doing.cancelled() or doing.exception()
        raise


def first_of(error: BaseException) -> BaseException:
    """Return an error, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


@contextmanager
def first_error() -> Generator[None]:
    """Raise the first error of a group of tasks as it was raised, without the group."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


@asynccontextmanager
async def beside(*companions: Coroutine[Any, Any, None]) -> AsyncGenerator[asyncio.TaskGroup]:
    """Run coroutines beside the body and end them with the body.

    Yields:
        The group that they are in; what else is put into it is waited for.

    Raises:
        Exception: The first one of all, as it was raised.
    """
    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(companion) for companion in companions]
            yield group
            for task in tasks:
                task.cancel()


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run parts side by side until all have ended, or one fails, which is raised as it was."""
    with first_error():
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)


async def either(*parts: Coroutine[Any, Any, object]) -> None:
    """Run parts side by side until the first one ends, then end the others; as `together`."""
    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
