"""Outboxes: what waits for one stream, handed over in lots, without polling."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from astraflow.core.errors import AstraflowError

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Items on their way to one reader, in order.

    A reader that waits is woken once for all that was put in one turn of the event loop, so
    a thousand items cost one wake-up. Items that nobody has taken stay for the next reader.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._clear_count = 0
        self._put_count = 0
        self._is_closed = False
        self._error: AstraflowError | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def put_count(self) -> int:
        """Items that were put in so far."""
        return self._put_count

    def put(self, item: Item) -> None:
        """Add one item; a closed outbox forgets it."""
        if not self._is_closed:
            self._items.append(item)
            self._put_count += 1
            self._wake()

    def clear(self) -> None:
        """Forget what was not delivered."""
        self._items.clear()
        self._clear_count += 1

    def close(self, error: AstraflowError | None = None) -> None:
        """End it: the reader gets what is left, then the error, or nothing for ever."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._wake()

    async def take(self) -> list[Item]:
        """Return all that is there, at least one item; empty when it was closed.

        Raises:
            AstraflowError: The one that it was closed with.
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
            AstraflowError: The one that it was closed with.
        """
        while items := await self.take():
            clear_count, delivered = self._clear_count, 0
            try:
                for item in items:
                    await write(item)
                    delivered += 1
            finally:
                if clear_count == self._clear_count:
                    self._items[:0] = items[delivered:]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
