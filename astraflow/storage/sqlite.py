"""A journal in one SQLite file, in WAL mode, written by a thread of its own.

Every record has a checksum over its bytes and its position. A torn tail is cut when the file is
opened; whatever else is wrong with the file keeps it closed, with an error that says what to do.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.fault_points import FaultPoint, reach
from astraflow.storage.lock import FileLock
from astraflow.storage.sqlite_file import (
    INCREMENTAL,
    PAGE_NBYTES,
    Durability,
    checksum,
    open_for_writing,
    read_rows,
    sound_bounds,
    unusable,
    unwritable,
)

Result = TypeVar("Result")

# Rows that one transaction of a trim lets go, and pages that it gives back to the disk: appends
# go on in between.
_TRIM_COUNT = 256
_SHRINK_PAGES = 32


class SqliteJournal:
    """A journal that outlives its process; one process at a time writes it."""

    def __init__(
        self, path: Path, database: sqlite3.Connection, lock: FileLock, *, bounds: tuple[int, int]
    ) -> None:
        """Take an opened file; use `open`."""
        self._path = path
        self._database = database
        self._lock = lock
        self._first, self._end = bounds
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def open(cls, path: Path, *, durability: Durability = Durability.PROCESS) -> "SqliteJournal":
        """Open the journal of a file, or begin one; blocks.

        Raises:
            AstraflowError: JOURNAL_FAILED when another process has it, it cannot be written, or
                it is damaged anywhere but at its end.
        """
        lock = FileLock.take(path.with_name(path.name + ".lock"))
        try:
            database = open_for_writing(path, durability)
            bounds = sound_bounds(path, database)
        except sqlite3.Error as error:
            lock.release()
            raise unusable(path, error) from error
        except AstraflowError:
            lock.release()
            raise
        return cls(path, database, lock, bounds=bounds)

    @property
    def first(self) -> int:
        """Position of the oldest record that is kept; `end` when there is none."""
        return self._first

    @property
    def end(self) -> int:
        """Position of the next record."""
        return self._end

    async def append(self, records: Sequence[bytes]) -> int:
        """Commit records in one transaction.

        Raises:
            AstraflowError: JOURNAL_FAILED when they cannot be written, such as on a full or
                read-only disk; none of them is kept then.
        """
        if self._is_closed:
            raise AstraflowError(Reason.JOURNAL_FAILED, "the journal is closed")
        return await self._do(lambda: self._append(records))

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        """Return at most `limit` records from position `start` on, their checksums verified.

        Raises:
            AstraflowError: JOURNAL_FAILED also for a record that is damaged or missing.
        """
        if not self._first <= start <= self._end:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"position {start} is not kept; the journal has {self._first} to {self._end}",
            )
        return await self._do(lambda: read_rows(self._path, self._database, start, limit))

    async def trim(self, before: int, *, spare_nbytes: int = 0) -> None:
        """Let go of every record below position `before`, and of their room, some at a time."""
        before = min(before, self._end)
        while self._first < before:
            upto = min(before, self._first + _TRIM_COUNT)
            await self._do(lambda upto=upto: self._trim(upto))
            reach(FaultPoint.TRIMMED_SOME)
        while await self._do(lambda: self._shrink(spare_nbytes // PAGE_NBYTES)):
            pass

    async def close(self) -> None:
        """Let nothing more be appended; what was appended can still be read."""
        if not self._is_closed:
            self._is_closed = True
            await self._do(lambda: self._database.execute("PRAGMA wal_checkpoint(PASSIVE)"))
            self._lock.release()

    async def _do(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise unwritable(self._path, error) from error

    def _append(self, records: Sequence[bytes]) -> int:
        position = self._end
        rows = [
            (number, checksum(number, record), record)
            for number, record in enumerate(records, position)
        ]
        with self._database:
            self._database.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
            reach(FaultPoint.JOURNAL_WRITTEN)
        reach(FaultPoint.JOURNAL_COMMITTED)
        self._end += len(rows)
        return position

    def _trim(self, before: int) -> None:
        with self._database:
            self._database.execute("DELETE FROM records WHERE position < ?", (before,))
            self._database.execute("UPDATE bounds SET first = ?", (before,))
        self._first = before

    def _shrink(self, spare: int) -> bool:
        """Give some free pages back to the disk; return whether there were more than to spare.

        A file that an older release began keeps its pages, and uses them again.
        """
        (mode,) = self._database.execute("PRAGMA auto_vacuum").fetchone()
        (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
        if mode != INCREMENTAL or free <= spare:
            return False
        count = min(_SHRINK_PAGES, free - spare)
        self._database.executescript(f"PRAGMA incremental_vacuum({count})")
        return True
