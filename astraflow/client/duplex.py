"""Streams in two directions: what goes out waits in an outbox, what comes in is handed over."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from grpc.aio import AioRpcError

Sent_contra = TypeVar("Sent_contra", contravariant=True)
Received_co = TypeVar("Received_co", covariant=True)
Item = TypeVar("Item")
Message = TypeVar("Message")
Answer = TypeVar("Answer")


class DuplexCall(Protocol[Sent_contra, Received_co]):
    """What is used of a grpc.aio call."""

    def __aiter__(self) -> AsyncIterator[Received_co]:
        """Return an iterator over what comes in."""
        ...

    async def write(self, request: Sent_contra) -> None:
        """Send one message; waits while the peer does not read."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class Outbox(Generic[Item]):
    """What waits to be written; a writer is woken once for all that came meanwhile."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add one item."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def reset(self, items: Iterable[Item]) -> None:
        """Forget what waits; `items` wait instead."""
        self._items = list(items)

    async def take(self) -> list[Item]:
        """Return all that waits, at least one item."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


@asynccontextmanager
async def beside(*companions: Coroutine[Any, Any, None]) -> AsyncGenerator[asyncio.TaskGroup]:
    """Run coroutines beside the body and end them with the body.

    Yields:
        The group that they are in; what else is put into it is waited for.

    Raises:
        Exception: The first one of all, as it was raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(companion) for companion in companions]
            yield group
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def converse(
    call: DuplexCall[Message, Answer],
    outbox: Outbox[Item],
    take: Callable[[Answer], None],
    *,
    pack: Callable[[Sequence[Item]], Iterable[Message]],
    pause_s: float = 0.0,
) -> None:
    """Write what waits and take what comes, until the peer ends the call.

    Args:
        call: Of a stream in two directions.
        outbox: Holds what waits.
        take: Called with each message that comes.
        pack: Puts what waits into messages.
        pause_s: Seconds after a write in which more comes together for the next one.

    Raises:
        AioRpcError: The call was cut or refused.
    """
    try:
        async with beside(_write(call, outbox, pack, pause_s)):
            async for answer in call:
                take(answer)
    finally:
        call.cancel()


async def _write(
    call: DuplexCall[Message, Answer],
    outbox: Outbox[Item],
    pack: Callable[[Sequence[Item]], Iterable[Message]],
    pause_s: float,
) -> None:
    try:
        while True:
            for message in pack(await outbox.take()):
                await call.write(message)
            if pause_s:
                await asyncio.sleep(pause_s)
    except (AioRpcError, asyncio.InvalidStateError):
        # The call is over; whoever reads it gets to know why.
        return
