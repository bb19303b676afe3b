"""JSON lines, encoded and written by a thread, so that no event loop waits for a disk."""

import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, BinaryIO

import structlog
from pydantic_core import PydanticSerializationError, to_json

from astraflow.core.texts import whole_text

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOT = 1024
# What comes so soon after a line is written with it: to wake a thread costs more than a line.
_GATHER_S = 0.02
_BLOCK_NBYTES = 1 << 16


class LineWriter:
    """Appends objects to JSON-lines files, in order per file.

    Lines that are waiting are written in lots with one flush per file and lot. A value that
    JSON does not know is written as text. A file that cannot be written is logged, and fails
    `flush` and `close` with OSError, not the caller of `write`.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Path, Callable[[], Mapping[str, Any]]] | Event | None] = (
            SimpleQueue()
        )
        self._files: dict[Path, BinaryIO] = {}
        self._error: Exception | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def write(self, path: Path, row: Mapping[str, Any]) -> None:
        """Append one object; returns at once."""
        self.write_later(path, lambda: row)

    def write_later(self, path: Path, make: Callable[[], Mapping[str, Any]]) -> None:
        """Append the object that `make` returns; it is called on the writer's thread."""
        if not self._is_closed:
            self._queue.put((path, make))

    def flush(self) -> None:
        """Wait until everything written so far is in its file."""
        if not self._is_closed:
            done = Event()
            self._queue.put(done)
            done.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is left and let go of the files; repeating it is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        is_open = True
        while is_open:
            lot = [self._queue.get()]
            if isinstance(lot[0], tuple):
                time.sleep(_GATHER_S)
            while len(lot) < _LOT and not self._queue.empty():
                lot.append(self._queue.get())
            waiting: list[Event] = []
            for item in lot:
                if item is None:
                    is_open = False
                elif isinstance(item, Event):
                    waiting.append(item)
                else:
                    self._append(*item)
            for path, file in self._files.items():
                with self._noting_errors(path):
                    file.flush()
            for event in waiting:
                event.set()
        for path, file in self._files.items():
            with self._noting_errors(path):
                file.close()

    def _append(self, path: Path, make: Callable[[], Mapping[str, Any]]) -> None:
        with self._noting_errors(path):
            # A fifth of the time that the standard library takes for lists of tokens.
            row = make()
            try:
                line = to_json(row, fallback=str, inf_nan_mode="constants")
            except PydanticSerializationError:
                # Half of a surrogate pair, as a prompt may have it, is no UTF-8.
                compact = json.dumps(row, default=str, ensure_ascii=False, separators=(",", ":"))
                line = whole_text(compact).encode()
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                _cut_torn_line(path)
                self._files[path] = path.open("ab")
            self._files[path].write(line + b"\n")

    @contextmanager
    def _noting_errors(self, path: Path) -> Generator[None]:
        """Keep what fails for `flush` and `close`: whoever waits for them needs this thread."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised there
            if self._error is None:
                # They may come days later.
                why = f"{type(error).__name__}: {error}"
                log.error("what should be in a file cannot be written", path=str(path), why=why)  # noqa: TRY400 - a full disk is no defect
            self._error = self._error or error


def _cut_torn_line(path: Path) -> None:
    """Cut what a process that died left of its last line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        sound = end
        while sound:
            start = max(0, sound - _BLOCK_NBYTES)
            file.seek(start)
            newline = file.read(sound - start).rfind(b"\n")
            if newline >= 0:
                sound = start + newline + 1
                break
            sound = start
        if sound < end:
            file.truncate(sound)
