"""The timeline: what happens when, in the order of time, and of arrival where times are equal."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush

Act = Callable[[], None]

START = datetime(2000, 1, 1, tzinfo=UTC)


class Timeline:
    """Runs acts at their times.

    Attributes:
        seconds: Simulated, since the start.
        now: The same as a time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.now = START
        self._acts: list[tuple[float, int, Act]] = []
        self._number = 0

    def after(self, seconds: float, act: Act) -> None:
        """Let something happen in so many seconds."""
        self._number += 1
        heappush(self._acts, (self.seconds + seconds, self._number, act))

    def run_until(self, seconds: float) -> int:
        """Do all that is due up to a time; return how many acts it were."""
        count = 0
        while self._acts and self._acts[0][0] <= seconds:
            due, _, act = heappop(self._acts)
            self._move(due)
            act()
            count += 1
        self._move(seconds)
        return count

    def _move(self, seconds: float) -> None:
        if seconds > self.seconds:
            self.seconds = seconds
            self.now = START + timedelta(seconds=seconds)
