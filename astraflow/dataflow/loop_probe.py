"""Watches the event loop: nobody may keep it from its other work for long."""

import asyncio
import time
from dataclasses import dataclass
from typing import Self

LIMIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """How the event loop fared.

    Attributes:
        tick_count: Looks taken.
        max_lag_s: Longest that a due look had to wait, by the wall clock: waiting for a
            core is in it.
        max_cpu_s: The same, but at most the CPU that the loop's thread used since the look
            before: an upper bound on one stretch of work.
        slow_count: Looks later than the limit of 50 ms.
    """

    tick_count: int
    max_lag_s: float
    max_cpu_s: float
    slow_count: int


class LoopProbe:
    """Takes a look every so often and notes how late it was."""

    def __init__(self, *, interval_s: float = 0.1) -> None:
        self._interval_s = interval_s
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._cpu = 0.0
        self._ticks = 0
        self._max_lag_s = 0.0
        self._max_cpu_s = 0.0
        self._slow = 0

    @property
    def stats(self) -> LoopStats:
        """What was seen so far."""
        return LoopStats(
            tick_count=self._ticks,
            max_lag_s=self._max_lag_s,
            max_cpu_s=self._max_cpu_s,
            slow_count=self._slow,
        )

    def __enter__(self) -> Self:
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._interval_s
        self._cpu = time.thread_time()
        self._handle = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        lag = max(0.0, asyncio.get_running_loop().time() - self._due)
        used = time.thread_time() - self._cpu
        self._ticks += 1
        self._max_lag_s = max(self._max_lag_s, lag)
        self._max_cpu_s = max(self._max_cpu_s, min(lag, used))
        self._slow += lag > LIMIT_S
        self._schedule()
