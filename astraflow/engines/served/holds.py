"""Holds: what keeps the one version of a server from changing for a while."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from astraflow.core.errors import AstraflowError, Reason


class Holds:
    """Lets a version change once nobody holds it; whoever comes meanwhile may still take hold.

    A server has one version at a time. So what is pinned (an evaluation) is finished before the
    next version goes live, and what is not pinned waits for it.

    Attributes:
        is_awaited: Whether the next version waits until nobody holds the live one.
        is_changing: Whether one version gives way to the next.
    """

    def __init__(self, live: Callable[[], int | None]) -> None:
        """Nobody holds anything.

        Args:
            live: Returns the version that can be held.
        """
        self._live = live
        self._counts = Counter[int]()
        self.is_awaited = False
        self.is_changing = False
        self._turn = asyncio.Condition()

    @property
    def versions(self) -> frozenset[int]:
        """What is held."""
        return frozenset(self._counts)

    async def take(self, version: int) -> None:
        """Hold a version until `drop`; counted.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is not live.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: not self.is_changing)
            if version != self._live():
                raise AstraflowError(
                    Reason.VERSION_NOT_SERVED,
                    f"version {version} is not served, {self._live()} is; a server has one version",
                    retryable=True,
                )
            self._counts[version] += 1

    async def settled(self) -> None:
        """Wait while the version changes."""
        if self.is_changing:
            async with self._turn:
                await self._turn.wait_for(lambda: not self.is_changing)

    async def drop(self, version: int) -> None:
        """Take one hold back."""
        async with self._turn:
            self._counts[version] -= 1
            if self._counts[version] <= 0:
                del self._counts[version]
            self._turn.notify_all()

    @asynccontextmanager
    async def changing(self, *, at_once: bool = False) -> AsyncGenerator[None]:
        """Wait until nobody holds a version, and keep others from it during the body.

        Args:
            at_once: Do not wait: what was held is lost with the server.
        """
        async with self._turn:
            self.is_awaited = True
            try:
                await self._turn.wait_for(lambda: at_once or not self._counts)
            finally:
                self.is_awaited = False
            self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False
            async with self._turn:
                self._turn.notify_all()
