"""Headroom: work that a node asks for beyond what it runs, so that it need not wait for the way."""

from collections import deque
from math import ceil
from typing import Final

# Of the newest episode in the mean.
_WEIGHT: Final = 1 / 16
_TASKS: Final = 32


class EpisodeTimes:
    """How long episodes take and how many samples tasks have, lately.

    Attributes:
        mean_s: Seconds per episode; 0: none has ended.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._sizes = deque[int](maxlen=_TASKS)

    def note_episode(self, seconds: float) -> None:
        """Count one episode."""
        weight = _WEIGHT if self.mean_s else 1.0
        self.mean_s += weight * (seconds - self.mean_s)

    def note_task(self, sample_count: int) -> None:
        """Count one task."""
        self._sizes.append(sample_count)

    @property
    def task_size(self) -> int:
        """Samples of the largest of the last tasks, at least 1."""
        return max(self._sizes, default=1)


def headroom(*, capacity: int, round_trip_s: float, episode_s: float, task_size: int) -> int:
    """Return how many samples to ask for beyond the capacity.

    In one round trip to the hub `capacity * round_trip_s / episode_s` episodes end; so many have to
    lie ready, in whole tasks. At most as many as run; none when it is less than half a sample.

    Example:
        16 at once, 0.3 s there and back, 0.8 s per episode: 6 end meanwhile. Tasks have 8 samples:
        8 more are asked for. With 1 ms there and back: none.
    """
    ending = capacity * round_trip_s / episode_s if episode_s > 0 else 0.0
    if ending < 0.5:
        return 0
    return min(capacity, ceil(ending / task_size) * task_size)
