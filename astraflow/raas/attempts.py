"""Attempts at versions: when a version that could not be had is tried again, and how often."""

from collections import Counter
from typing import Final

from astraflow.core.errors import Reason
from astraflow.core.versions import UNSOUND
from astraflow.rpc.concurrency import Backoff

# Each may cost a whole copy of the weights; what is registered or kept wrongly stays so.
_UNSOUND_COUNT: Final = 3


class Attempts:
    """Counts the attempts that failed.

    A source that is away comes back, so a version that nobody gives is tried until it is had.
    One that was had and is not what the run registered is tried three times: then it is over,
    until the run announces it anew. The next version is tried in any case.

    Attributes:
        failure_count: In a row.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.failure_count = 0
        self._backoff = backoff
        self._unsound = Counter[int]()

    def failed(self, version: int, reason: Reason) -> float:
        """Count an attempt; return the seconds to wait before the next one."""
        self.failure_count += 1
        if reason in UNSOUND:
            self._unsound[version] += 1
        return self._backoff.pause_s(self.failure_count)

    def succeeded(self) -> None:
        """Begin anew."""
        self.failure_count = 0
        self._unsound.clear()

    def announced(self, version: int) -> None:
        """Give a version its attempts: the run has said something new of it."""
        self._unsound.pop(version, None)

    def are_over(self, version: int) -> bool:
        """Whether a version is not tried again."""
        return self._unsound[version] >= _UNSOUND_COUNT
