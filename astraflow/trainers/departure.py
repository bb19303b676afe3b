"""Signals: the first one lets the step in progress end, the second one stops at once."""

import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import structlog

Item = TypeVar("Item")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Leave(BaseException):
    """Ends a wait for the next batch."""


class Departure:
    """Ends the iteration over batches when the process is asked to leave.

    A signal that comes during a step lets it end; one that comes while the next batch is
    waited for ends the wait. The second one is a KeyboardInterrupt wherever it comes.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._waits = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Take SIGTERM and SIGINT; outside the main thread, which alone can, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        old = [signal.signal(number, self._asked) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, old, strict=True):
                signal.signal(number, handler)

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items until there are no more or the process is asked to leave."""
        iterator = iter(items)
        while not self.is_asked:
            try:
                self._waits = True
                item = next(iterator)
            except StopIteration:
                return
            except _Leave:
                break
            finally:
                self._waits = False
            yield item
        log.info("asked to leave")

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        """Note it; nothing is logged here, in the middle of what may be writing a line."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        if self._waits:
            raise _Leave
