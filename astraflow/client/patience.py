"""Patience: how long a caller goes on trying while its peer cannot be reached."""

import asyncio
import math
import random
from dataclasses import dataclass

from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError

# The limit of patience with a peer that others hear from.
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


class Pulse:
    """When a peer last showed that it works; shared by all who speak with it."""

    def __init__(self) -> None:
        """Begin without a sign of it."""
        self.heard_s = -math.inf

    def note(self, now_s: float) -> None:
        """Take note of an answer."""
        self.heard_s = max(self.heard_s, now_s)


class Patience:
    """Knows since when a caller fails, and says when it was enough.

    A peer that comes and goes is borne as long as it shows in between that it works, to whichever
    caller that shares its pulse. That a call fails for ever beside others that do not is borne ten
    times as long as a peer that is away.

    Example:
        `while True: try: return await call() except ... as error: await patience.pause(error)`
    """

    def __init__(
        self,
        limit_s: float,
        *,
        backoff: Backoff | None = None,
        clock: Clock | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Start fresh.

        Args:
            limit_s: How long failures may go on without a success between them.
            backoff: Pauses between attempts.
            clock: Tells the time.
            pulse: Of the peer; None: one that nobody else sees.
        """
        self._limit_s = limit_s
        self._backoff = backoff or Backoff()
        self._clock = clock or SystemClock()
        self._pulse = pulse or Pulse()
        self._failed_since: float | None = None
        self._attempts = 0
        self._deaf_s = 0.0

    def renew(self) -> None:
        """Note a success."""
        self._failed_since = None
        self._attempts = 0
        self._deaf_s = 0.0
        self._pulse.note(self._clock.monotonic())

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
        left_s = self._end_s(self._failed_since, is_away=is_away) + self._deaf_s - now
        if left_s <= 0:
            raise error
        pause_s = min(left_s, self._backoff.pause_s(self._attempts))
        await asyncio.sleep(pause_s)
        # A process that stood still meanwhile could not hear anybody.
        self._deaf_s += max(0.0, self._clock.monotonic() - now - pause_s)

    def _end_s(self, since_s: float, *, is_away: bool) -> float:
        """Return when it is enough."""
        if not is_away:
            return since_s + self._limit_s
        longest = since_s + _MOST_TIMES * self._limit_s
        return min(longest, max(since_s, self._pulse.heard_s) + self._limit_s)
