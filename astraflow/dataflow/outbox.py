"""Outboxes: what waits for one stream, handed over in lots, without polling."""

import asyncio
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
        self._is_closed = False
        self._error: AstraflowError | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add one item; a closed outbox forgets it."""
        if not self._is_closed:
            self._items.append(item)
            self._wake()

    def put_back(self, items: list[Item]) -> None:
        """Return items that were taken and not delivered, before all others."""
        self._items[:0] = items

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
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
