"""The SQLite file of a journal: made, opened, checked and read."""

import sqlite3
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from zlib import crc32

import structlog

from astraflow.core.errors import AstraflowError, Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

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


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a journal's file beside the process that writes it.

    Raises:
        AstraflowError: JOURNAL_FAILED when there is none, or it is none.
    """
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        _must_be_ours(path, database)
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    return database


def read_rows(path: Path, database: sqlite3.Connection, start: int, limit: int) -> list[bytes]:
    """Return records from a position on.

    Raises:
        AstraflowError: JOURNAL_FAILED for a record that is damaged or missing.
    """
    query = "SELECT * FROM records WHERE position >= ? ORDER BY position LIMIT ?"
    records: list[bytes] = []
    with closing(database.execute(query, (start, limit))) as rows:
        for expected, (position, said, record) in enumerate(rows, start):
            if position != expected or said != checksum(position, record):
                raise _damaged(path, expected)
            records.append(record)
    return records


def bounds_of(database: sqlite3.Connection) -> tuple[int, int]:
    """Return the positions of the oldest record that is kept and of the next one."""
    (first,) = database.execute("SELECT first FROM bounds").fetchone()
    (last,) = database.execute("SELECT max(position) FROM records").fetchone()
    return first, first if last is None else last + 1


def open_for_writing(path: Path, durability: Durability) -> sqlite3.Connection:
    """Open a journal's file, or begin one.

    Raises:
        AstraflowError: JOURNAL_FAILED when it is none of this format.
        sqlite3.Error: It cannot be read or written.
    """
    database = sqlite3.connect(path, check_same_thread=False, timeout=10)
    # Some builds write zeros over what is let go, which doubles the cost of a trim.
    database.execute("PRAGMA secure_delete=OFF")
    database.execute(f"PRAGMA page_size={PAGE_NBYTES}")
    database.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
    (table_count,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if table_count:
        _must_be_ours(path, database)
    database.execute("PRAGMA journal_mode=WAL")
    if not table_count:
        _begin(database)
    database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[durability]}")
    database.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    database.execute(f"PRAGMA journal_size_limit={_LOG_NBYTES}")
    with database:
        # A disk that cannot be written is found now and not with the first rollout.
        database.execute("UPDATE bounds SET first = first")
    return database


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


def sound_bounds(path: Path, database: sqlite3.Connection) -> tuple[int, int]:
    """Cut a torn tail, records at the very end whose checksum is wrong; return what is left.

    Raises:
        AstraflowError: JOURNAL_FAILED when nothing is sound.
    """
    first, end = bounds_of(database)
    torn = end
    query = "SELECT position, checksum, record FROM records ORDER BY position DESC"
    with closing(database.execute(query)) as rows:
        for position, said, record in rows:
            if said == checksum(position, record):
                break
            torn = position
    if torn < end:
        _must_be_a_tail(path, first=first, torn=torn)
        log.warning("journal: a torn tail is cut", path=str(path), records=end - torn)
        with database:
            database.execute("DELETE FROM records WHERE position >= ?", (torn,))
    return first, torn


def _must_be_a_tail(path: Path, *, first: int, torn: int) -> None:
    """Refuse a journal of which nothing is sound: that is no torn tail."""
    if torn <= first:
        raise _damaged(path, first)


def _damaged(path: Path, position: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} is damaged at record {position}, before its end; restore the file from a copy, or "
        "move the folder aside to begin the run anew from the trainer's last checkpoint",
        metadata={"position": str(position)},
    )


def unusable(path: Path, error: sqlite3.Error) -> AstraflowError:
    """Return what to say of a file that cannot be opened."""
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} cannot be opened ({error}); check that the folder can be written and the disk has "
        "room; a damaged file is restored from a copy, or moved aside to begin anew",
    )


def unwritable(path: Path, error: sqlite3.Error) -> AstraflowError:
    """Return what to say of a file that was opened and cannot be used any more."""
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{path} cannot be used ({error}); make room or make it writable, and start the hub again "
        "with the same run folder: nothing that was acknowledged is lost",
    )
