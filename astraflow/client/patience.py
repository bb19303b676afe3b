"""Patience: how long a caller goes on trying while its peer cannot be reached."""

import asyncio
import random
from dataclasses import dataclass

from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError


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


class Patience:
    """Counts failures in a row and says when it was enough.

    Example:
        `while True: try: return await call() except ... as error: await patience.pause(error)`
    """

    def __init__(
        self, limit_s: float, *, backoff: Backoff | None = None, clock: Clock | None = None
    ) -> None:
        """Start fresh.

        Args:
            limit_s: How long failures may go on without a success between them.
            backoff: Pauses between attempts.
            clock: Tells the time.
        """
        self._limit_s = limit_s
        self._backoff = backoff or Backoff()
        self._clock = clock or SystemClock()
        self._failed_since: float | None = None
        self._attempts = 0

    def renew(self) -> None:
        """Note a success."""
        self._failed_since = None
        self._attempts = 0

    async def pause(self, error: AstraflowError) -> None:
        """Wait before the next attempt.

        Raises:
            AstraflowError: `error`, when the limit would pass during the wait.
        """
        now = self._clock.monotonic()
        if self._failed_since is None:
            self._failed_since = now
        self._attempts += 1
        pause_s = self._backoff.pause_s(self._attempts)
        if now + pause_s - self._failed_since > self._limit_s:
            raise error
        await asyncio.sleep(pause_s)
