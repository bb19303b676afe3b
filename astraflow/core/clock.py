"""Clocks: the one way in which time enters."""

import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Tells the time; nothing in the house asks the system for it directly."""

    def now(self) -> datetime:
        """Return the time of day, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back, for spans."""
        ...


class SystemClock:
    """The machine's own clock."""

    now = staticmethod(partial(datetime.now, UTC))
    monotonic = staticmethod(time.monotonic)


class SteadyClock:
    """The time of day at the start, and from then on as much later as has passed.

    A clock of the machine that is set forward or back meanwhile moves no deadline.
    """

    def __init__(self, clock: Clock, *, not_before: datetime | None = None) -> None:
        """Begin with what `clock` says, or with a later time that is known to have been."""
        now = clock.now()
        self._start = now if not_before is None else max(now, not_before)
        self.monotonic = clock.monotonic
        self._began_s = clock.monotonic()

    def now(self) -> datetime:
        """Return the time of day as it would be had nobody set the clock."""
        return self._start + timedelta(seconds=self.monotonic() - self._began_s)


class ManualClock:
    """A clock that moves when it is told to, for tests and simulation."""

    def __init__(self, start: datetime = datetime(2000, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._now = start

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        """Return seconds since the start."""
        return (self._now - self._start).total_seconds()

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
