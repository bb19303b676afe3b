"""The clock of the run, as far as a member hears of it."""

import math
from collections import deque
from datetime import datetime, timedelta

from astraflow.core.clock import Clock

_ROUND_TRIPS = 8


class RunClock:
    """Tells the time by the run's clock; this machine's own may be hours off."""

    def __init__(self, clock: Clock) -> None:
        """Know nothing yet; `clock` measures what passes since the run was heard."""
        self._clock = clock
        self._told: datetime | None = None
        self._heard_s = -math.inf
        self._round_trips = deque[float](maxlen=_ROUND_TRIPS)

    @property
    def now(self) -> datetime | None:
        """The time; None before it was told."""
        if self._told is None:
            return None
        return self._told + timedelta(seconds=self._clock.monotonic() - self._heard_s)

    @property
    def round_trip_s(self) -> float:
        """Seconds there and back, the shortest of the last calls; 0: none was answered."""
        return min(self._round_trips, default=0.0)

    def hear(self, told: datetime, *, asked_s: float) -> None:
        """Take what an answer says the time is, asked for at `asked_s` by the monotonic clock."""
        self._told, self._heard_s = told, self._clock.monotonic()
        self._round_trips.append(self._heard_s - asked_s)

    def was_heard_since(self, time_s: float) -> bool:
        """Whether an answer came after `time_s` by the monotonic clock."""
        return self._heard_s > time_s
