"""Backlog: file work in a thread of its own, in order, at low priority."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_NICENESS: Final = 10


class Backlog:
    """Runs jobs one after the other; one that the file system refuses is counted.

    Attributes:
        waiting_nbytes: Of the jobs that are still to be done.
    """

    def __init__(self, *, name: str, failed: Callable[[OSError], None]) -> None:
        """Start no thread yet.

        Args:
            name: Of the thread.
            failed: Called in it for each job that failed.
        """
        self.waiting_nbytes = 0
        self._failed = failed
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._is_over = self._is_busy = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def do(self, job: Callable[[], None], nbytes: int = 0) -> None:
        """Add a job, which keeps so many bytes in memory."""
        with self._changed:
            if not self._thread.ident:
                self._thread.start()
            self._jobs.append((job, nbytes))
            self.waiting_nbytes += nbytes
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all jobs are done, or the backlog is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not (self._jobs or self._is_busy))

    def close(self) -> None:
        """End the thread after the job that it is at; the others are forgotten."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (found := self._next()) is not None:
            job, nbytes = found
            try:
                job()
            except OSError as error:
                self._failed(error)
            finally:
                with self._changed:
                    self.waiting_nbytes -= nbytes
                    self._is_busy = False
                    self._changed.notify_all()

    def _next(self) -> tuple[Callable[[], None], int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_over)
            if self._is_over:
                return None
            self._is_busy = True
            return self._jobs.popleft()
