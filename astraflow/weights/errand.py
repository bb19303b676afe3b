"""Errand: work beside training, at low priority, in a thread that `with` starts and ends."""

import os
import sys
import threading
from typing import Final, Self

_NICENESS: Final = 10


class Errand:
    """Does its work whenever it is woken; what comes while it works is one more time."""

    def __init__(self, *, name: str, last_s: float = 0.0) -> None:
        """Prepare; `with` starts the thread.

        Args:
            name: Of the thread.
            last_s: At its end the work is done once more, and so long is waited for it; 0: its end
                is waited for, and no more work is begun.
        """
        self._last_s = last_s
        self._is_over = self._has_failed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """End the thread, after what it is at; one that hangs is left behind after `last_s`."""
        self._has_failed = failure is not None
        self._is_over = True
        self._wake.set()
        self._thread.join(self._last_s or None)

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        is_over = False
        while not is_over:
            self._wake.wait()
            self._wake.clear()
            is_over = self._is_over
            if not is_over or self._last_s:
                self._work()

    def _work(self) -> None:
        """Do what there is to do; called in the thread."""
        raise NotImplementedError
