"""A journal in one SQLite file, in WAL mode, written by a thread of its own.

Every record has a checksum over its bytes and its position, and a watermark beside the file says
how far records may have been acknowledged. A torn tail behind that is cut when the file is opened;
whatever else is wrong with the files keeps them closed, with JOURNAL_FAILED, which says what to do.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar
from weakref import finalize
from zlib import crc32

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.fault_points import FaultPoint, armed, hit
from astraflow.storage.lock import FileLock, lock_beside
from astraflow.storage.watermark import Level, Watermark, read_level, watermark_of

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Result = TypeVar("Result")
Value = TypeVar("Value")

_FORMAT = 1

# Free pages are given back when they are asked for.
INCREMENTAL = 2

# "afjl"; tells `file` and us what this is.
_APPLICATION = 0x61666A6C

# Records of some kB fill a page of this size well.
PAGE_NBYTES = 32768

# Many short checkpoints: an append waits for one at most.
_CHECKPOINT_PAGES = 128

# What the write-ahead log keeps of a burst.
_LOG_NBYTES = 4 * _CHECKPOINT_PAGES * PAGE_NBYTES

_SCHEMA = (
    f"PRAGMA application_id={_APPLICATION}",
    f"PRAGMA user_version={_FORMAT}",
    "CREATE TABLE bounds (first INTEGER NOT NULL)",
    "INSERT INTO bounds VALUES (0)",
    "CREATE TABLE identity (id BLOB NOT NULL)",
    "INSERT INTO identity VALUES (randomblob(16))",
    "CREATE TABLE records"
    " (position INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, record BLOB NOT NULL)",
)


class Durability(StrEnum):
    """What an appended record survives: the death of the process, or of the machine's power."""

    PROCESS = "process"
    POWER = "power"


# What was written is in the kernel's hands, and survives the process. An fsync now and
# then would add its stalls and still not keep the end of the journal.
_SYNCHRONOUS = {Durability.PROCESS: "OFF", Durability.POWER: "FULL"}


def checksum(position: int, record: bytes) -> int:
    """Return the CRC-32 of a record at its place."""
    return crc32(record, position & 0xFFFFFFFF)


def checksums(records: Sequence[bytes], start: int) -> list[int]:
    """Return the checksums of records that go on from a position."""
    return [crc32(record, number & 0xFFFFFFFF) for number, record in enumerate(records, start)]


def verified(
    rows: Iterable[tuple[int, int, bytes]], start: int, damaged: Callable[[int], AstraflowError]
) -> list[bytes]:
    """Return the records of rows, (position, checksum, record), which go on from a position."""
    records: list[bytes] = []
    for expected, (position, said, record) in enumerate(rows, start):
        if position != expected or said != checksum(position, record):
            raise damaged(expected)
        records.append(record)
    return records


@contextmanager
def _unless_refused(database: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Close a database again that the block finds a fault with."""
    try:
        yield database
    except BaseException:
        database.close()
        raise


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a journal's file beside the process that writes it."""
    try:
        opened = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        with _unless_refused(opened) as database:
            _must_be_ours(path, database)
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    return database


def read_rows(path: Path, database: sqlite3.Connection, start: int, limit: int) -> list[bytes]:
    query = "SELECT * FROM records WHERE position >= ? ORDER BY position LIMIT ?"
    with closing(database.execute(query, (start, limit))) as rows:
        return verified(rows, start, partial(_damaged, path))


def bounds_of(database: sqlite3.Connection) -> tuple[int, int]:
    """Return the positions of the oldest record that is kept and of the next one."""
    (last,) = database.execute("SELECT max(position) FROM records").fetchone()
    first = _only(database, "SELECT first FROM bounds", int)
    return first, first if last is None else last + 1


def _only(database: sqlite3.Connection, query: str, kind: type[Value]) -> Value:
    """Return the one value of a table with one row."""
    rows = database.execute(query).fetchall()
    if len(rows) != 1 or not isinstance(rows[0][0], kind):
        raise sqlite3.DatabaseError(f"{query}: {len(rows)} rows, or not of its type")
    return rows[0][0]


def identity_of(database: sqlite3.Connection) -> bytes:
    """Return what tells a journal from every other; empty: an earlier release began it."""
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'identity'"
    if not database.execute(query).fetchone()[0]:
        return b""
    return _only(database, "SELECT id FROM identity", bytes)


def open_for_writing(path: Path, durability: Durability) -> tuple[sqlite3.Connection, bool]:
    """Open a journal's file, or begin one; return it, and whether it was begun."""
    opened = sqlite3.connect(path, check_same_thread=False, timeout=10)
    with _unless_refused(opened) as database:
        # Some builds write zeros over what is let go, which doubles the cost of a trim.
        database.execute("PRAGMA secure_delete=OFF")
        database.execute(f"PRAGMA page_size={PAGE_NBYTES}")
        database.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
        (table_count,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if table_count:
            _must_be_ours(path, database)
            (fault,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if fault != "ok":
                raise sqlite3.DatabaseError(fault)
        elif read_level(path) is not None:
            raise _incomplete(path, "it is empty, and its watermark is there")
        database.execute("PRAGMA journal_mode=WAL")
        if not table_count:
            _begin(database)
            # What tells whether its write-ahead file is lost must not be in there.
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[durability]}")
        database.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        database.execute(f"PRAGMA journal_size_limit={_LOG_NBYTES}")
        with database:
            # A disk that cannot be written is found now and not with the first rollout.
            database.execute("UPDATE bounds SET first = first")
    return database, not table_count


def _begin(database: sqlite3.Connection) -> None:
    """Make the tables, all or none."""
    database.execute("BEGIN")
    with database:
        for statement in _SCHEMA:
            database.execute(statement)


def _must_be_ours(path: Path, database: sqlite3.Connection) -> None:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION or version != _FORMAT:
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"{path} is no journal of format {_FORMAT} (application {application:#x}, format "
            f"{version}); open it with the release that wrote it, or move it aside to begin anew",
        )


def sound_bounds(
    path: Path, database: sqlite3.Connection, *, acknowledged: int = 0
) -> tuple[int, int]:
    """Cut a torn tail, not what may be acknowledged; return what is left."""
    first, written = bounds_of(database)
    end, is_torn = first, False
    query = "SELECT position, checksum, record FROM records ORDER BY position DESC"
    with closing(database.execute(query)) as rows:
        for position, said, record in rows:
            if said == checksum(position, record):
                # Not the lowest torn position: a torn row may have any.
                end = position + 1
                break
            is_torn = True
    if is_torn and (end <= first or end < acknowledged):
        raise _damaged(path, end)
    if end < acknowledged:
        raise _cut_off(path, end, acknowledged)
    if is_torn:
        log.warning("journal: a torn tail is cut", path=str(path), end=end, written=written)
        with database:
            database.execute("DELETE FROM records WHERE position >= ?", (end,))
    return first, end


def _acknowledged(path: Path, database: sqlite3.Connection) -> Level:
    """Return which journal this is, and how far it may have been acknowledged."""
    level, identity = read_level(path), identity_of(database)
    if level is not None and level.identity != identity:
        raise _incomplete(path, "its watermark is of another journal")
    if level is not None:
        return level
    if not identity:
        # An earlier release began it, without a watermark.
        with database:
            database.execute("CREATE TABLE identity (id BLOB NOT NULL)")
            database.execute("INSERT INTO identity VALUES (randomblob(16))")
        return Level(identity_of(database), 0)
    log.warning("journal: its watermark is missing or damaged and made anew", path=str(path))
    return Level(identity, bounds_of(database)[1])


def must_not_be_lost(path: Path) -> None:
    """Refuse to begin a journal where one was."""
    if not path.exists() or not path.stat().st_size:
        for left in (watermark_of(path), _log_of(path)):
            if left.exists() and left.stat().st_size:
                raise _incomplete(path, f"it is missing or empty, and {left.name} is there")
    elif read_level(path) is None and not _log_of(path).exists():
        # Read as it is: to open it otherwise makes a write-ahead file.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as found:
            if identity_of(found):
                raise _incomplete(path, "neither its write-ahead file nor its watermark is there")


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _cut_off(path: Path, end: int, acknowledged: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} ends at record {end}, and {acknowledged} may have been acknowledged: its "
        "write-ahead file is lost, or it is an older copy, or the machine lost its power with "
        "durability: process; restore the whole folder from one copy, or move it aside to "
        "begin the run anew from the trainer's last checkpoint",
        metadata={"position": str(end)},
    )


def _incomplete(path: Path, why: str) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} is not whole: {why}; restore the whole folder from one copy, or move it aside to "
        "begin the run anew from the trainer's last checkpoint",
    )


def _damaged(path: Path, position: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} is damaged at record {position}, before its end; restore the file from a copy, or "
        "move the folder aside to begin the run anew from the trainer's last checkpoint",
        metadata={"position": str(position)},
    )


def unusable(path: Path, error: Exception) -> AstraflowError:
    """Return what to say of a file that cannot be opened."""
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} cannot be opened ({error}); check that the folder can be written and the disk has "
        "room; a damaged file is restored from a copy, or moved aside to begin anew",
    )


def unwritable(path: Path, error: Exception) -> AstraflowError:
    """Return what to say of a file that was opened and cannot be used any more."""
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} cannot be used ({error}); make room or make it writable, and start the hub again "
        "with the same run folder: nothing that was acknowledged is lost",
    )


# Rows that one transaction of a trim lets go, and pages that it gives back to the disk: appends
# go on in between.
_TRIM_COUNT = 256
_SHRINK_PAGES = 32


class SqliteJournal:
    """A journal that outlives its process; one process at a time writes it."""

    def __init__(
        self,
        path: Path,
        database: sqlite3.Connection,
        lock: FileLock,
        watermark: Watermark,
        identity: bytes,
        *,
        bounds: tuple[int, int],
    ) -> None:
        """Take an opened file; use `open`."""
        self.identity = identity
        self._watermark = watermark
        self._path = path
        self._database = database
        self._lock = lock
        self.first, self.end = bounds
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        # It is read from after `close`, too. Not at the end of the process, which may be a fork.
        finalize(self, database.close).atexit = False

    @classmethod
    def open(cls, path: Path, *, durability: Durability = Durability.PROCESS) -> "SqliteJournal":
        """Open the journal of a file, or begin one; blocks.

        Raises:
            AstraflowError: JOURNAL_FAILED when another process has it, it cannot be written, or
                it is damaged anywhere but at its end.
        """
        lock = FileLock.take(lock_beside(path))
        try:
            must_not_be_lost(path)
            opened, is_new = open_for_writing(path, durability)
            with _unless_refused(opened) as database:
                level = Level(identity_of(database), 0) if is_new else _acknowledged(path, database)
                bounds = sound_bounds(path, database, acknowledged=level.end)
                watermark = Watermark(path, Level(level.identity, bounds[1]))
        except (sqlite3.Error, OSError) as error:
            lock.release()
            raise unusable(path, error) from error
        except AstraflowError:
            lock.release()
            raise
        return cls(path, database, lock, watermark, level.identity, bounds=bounds)

    async def append(self, records: Sequence[bytes]) -> int:
        """Commit records in one transaction, all or none."""
        if self._is_closed:
            raise AstraflowError(Reason.JOURNAL_FAILED, "the journal is closed")
        return await self._do(partial(self._append, records))

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        if not self.first <= start <= self.end:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"position {start} is not kept; the journal has {self.first} to {self.end}, "
                "and its snapshot is missing or an older copy; restore the whole folder from one "
                "copy",
            )
        return await self._do(lambda: read_rows(self._path, self._database, start, limit))

    async def trim(self, before: int, *, spare_nbytes: int = 0) -> None:
        """Let go of every record below position `before`, and of their room, some at a time."""
        before = min(before, self.end)
        while self.first < before:
            upto = min(before, self.first + _TRIM_COUNT)
            await self._do(lambda upto=upto: self._trim(upto))
            hit(FaultPoint.TRIMMED_SOME)
        while await self._do(lambda: self._shrink(spare_nbytes // PAGE_NBYTES)):
            pass

    async def fenced(self) -> None:
        """Wait for ever: the lock is this process's own."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let nothing more be appended; what was appended can still be read."""
        if not self._is_closed:
            self._is_closed = True
            try:
                await self._do(lambda: self._database.execute("PRAGMA wal_checkpoint(PASSIVE)"))
            finally:
                # Also where the disk is full: it may be opened again in this process.
                self._watermark.close()
                self._lock.release()

    async def _do(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise unwritable(self._path, error) from error

    def _append(self, records: Sequence[bytes]) -> int:
        position = self.end
        rows = zip(count(position), checksums(records, position), records, strict=False)
        with self._database:
            self._database.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
            if armed:
                hit(FaultPoint.JOURNAL_WRITTEN)
        self._watermark.rise(position + len(records))
        if armed:
            hit(FaultPoint.JOURNAL_COMMITTED)
        self.end += len(records)
        return position

    def _trim(self, before: int) -> None:
        with self._database:
            self._database.execute("DELETE FROM records WHERE position < ?", (before,))
            self._database.execute("UPDATE bounds SET first = ?", (before,))
        self.first = before

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


class JournalReader:
    """The records that a journal's file has when this is made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Before the bounds, which may grow meanwhile.
            level = read_level(path)
            with _unless_refused(open_for_reading(path)) as self._database:
                self.first, self.end = bounds_of(self._database)
                self.identity = identity_of(self._database)
                if level is not None and level.identity != self.identity:
                    raise _incomplete(path, "its watermark is of another journal")
                if level is not None and level.end > self.end:
                    raise _cut_off(path, self.end, level.end)
        except (sqlite3.Error, OSError) as error:
            raise unusable(path, error) from error

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        limit = min(limit, self.end - start)
        try:
            records = read_rows(self._path, self._database, start, limit)
        except sqlite3.Error as error:
            raise unusable(self._path, error) from error
        if len(records) < limit:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"{self._path} has no record {start + len(records)}; restore the whole folder from "
                "one copy",
            )
        return records

    def close(self) -> None:
        self._database.close()
