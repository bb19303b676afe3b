"""Alarm: wakes the hub for the deadlines of its run, and lets it hear its members first."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import structlog

from astraflow.core.clock import Clock

log = structlog.get_logger(__name__)

# A deadline that is noticed so late says that the process or its machine stood still; whoever was
# not heard meanwhile says something within the other time.
_LATE_S: Final = 0.2
_HEARD_WITHIN_S: Final = 5.0


class Alarm:
    """Waits for the next deadline, which may come sooner meanwhile."""

    def __init__(self, next_deadline: Callable[[], datetime | None], clock: Clock) -> None:
        """Prepare.

        Args:
            next_deadline: Returns when something is due; None: nothing is.
            clock: By which it is due.
        """
        self._next_deadline = next_deadline
        self._clock = clock
        self._due: datetime | None = None
        self._is_sooner = asyncio.Event()

    def note(self) -> None:
        """Look at the deadline again: it may have changed."""
        due = self._next_deadline()
        if due is not None and (self._due is None or due < self._due):
            self._is_sooner.set()

    async def rung(self) -> bool:
        """Wait for the deadline, or until there is a sooner one; return whether one has passed."""
        self._is_sooner.clear()
        self._due = self._next_deadline()
        await self._hear(await self._overslept())
        due = self._next_deadline()
        return due is not None and due <= self._clock.now()

    async def _overslept(self) -> float:
        """Wait until the deadline; return by how many seconds it was missed, 0: not at all."""
        wait_s, started = self._wait_s(), time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                await self._is_sooner.wait()
        except TimeoutError:
            return time.monotonic() - started - (wait_s or 0.0)
        return 0.0

    async def _hear(self, overslept_s: float) -> None:
        """Take what was said to a hub that did not run for some time, before silence counts."""
        while overslept_s > _LATE_S:
            log.info("the hub stood still", seconds=round(overslept_s, 3))
            started, pause_s = time.monotonic(), min(overslept_s, _HEARD_WITHIN_S)
            await asyncio.sleep(pause_s)
            overslept_s = time.monotonic() - started - pause_s

    def _wait_s(self) -> float | None:
        """Return the seconds until the deadline; None: there is none."""
        if self._due is None:
            return None
        # Never 0: a deadline that a tick does not move must not keep the loop.
        return max(0.001, (self._due - self._clock.now()).total_seconds())
