"""Topics: many watchers wait for one thing to change."""

import asyncio


class Topic:
    """Counts the changes of a thing and wakes those who wait for the next one.

    Example:
        `seen = topic.revision`, look at the thing, `await topic.passed(seen)`, look again.
        A change between the look and the wait is never missed.
    """

    def __init__(self) -> None:
        self._revision = 0
        self._next: asyncio.Event | None = None

    @property
    def revision(self) -> int:
        """Changes so far."""
        return self._revision

    def touch(self) -> None:
        """Count a change and wake the watchers, all with one event."""
        self._revision += 1
        if self._next is not None:
            self._next.set()
            self._next = None

    async def passed(self, revision: int) -> None:
        """Wait until there was a change after `revision`."""
        while self._revision <= revision:
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()
