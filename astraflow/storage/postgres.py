"""A journal in PostgreSQL, one schema per run: hubs on other hosts can go on with it.

One hub at a time writes it. Who opens it raises the epoch of the schema's one row in `hub`, and
every commit names its epoch: a hub whose epoch is old commits nothing more, whatever it believes.
While it lives it renews a lease in that row; nobody takes the journal from a hub whose lease lasts.

A connection that breaks, as when the server is started again, is made anew while the lease may
last, and what was on its way is looked for before it is written again: it is there once.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, LiteralString, TypeVar
from zlib import crc32

import psycopg
import structlog
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.storage.sqlite import Durability, checksums, verified

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Result = TypeVar("Result")

Database = psycopg.Connection[tuple[Any, ...]]

_FORMAT: Final = 1

# A database whose host is gone is noticed within about ten seconds; the URL may say otherwise.
_CONNECT: Final = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "astraflow",
}

_SCHEMA: Final[tuple[LiteralString, ...]] = (
    "CREATE TABLE hub (format integer NOT NULL, identity bytea NOT NULL, epoch bigint NOT NULL,"
    " first_position bigint NOT NULL, end_position bigint NOT NULL, beat timestamptz)",
    "CREATE TABLE records (position bigint PRIMARY KEY, checksum bigint NOT NULL,"
    " record bytea NOT NULL)",
    "CREATE TABLE snapshot (part integer PRIMARY KEY, position bigint NOT NULL,"
    " identity bytea NOT NULL, checksum bigint NOT NULL, data bytea NOT NULL)",
    "INSERT INTO hub VALUES ({format}, uuid_send(gen_random_uuid()), 0, 0, 0, NULL)",
)

# One statement is one transaction and one round trip. Its lock on the row of `hub` orders it
# against a takeover.
_APPEND: Final = """
WITH mine AS (
  UPDATE hub SET end_position = %(start)s + %(count)s, beat = clock_timestamp()
  WHERE epoch = %(epoch)s AND end_position = %(start)s RETURNING epoch
)
INSERT INTO records (position, checksum, record)
SELECT %(start)s + number - 1, checksum, record
FROM mine, unnest(%(checksums)b::bigint[], %(records)b::bytea[])
  WITH ORDINALITY AS each (checksum, record, number)
"""

_TRIM: Final = """
WITH mine AS (
  UPDATE hub SET first_position = %(before)s WHERE epoch = %(epoch)s RETURNING epoch
)
DELETE FROM records USING mine WHERE position < %(before)s
"""

_TAKE: Final = """
UPDATE hub SET epoch = epoch + 1, beat = clock_timestamp()
WHERE beat IS NULL OR clock_timestamp() - beat > make_interval(secs => %s)
RETURNING epoch
"""

_RECONNECT_S: Final = 0.1

# Rows that one statement of a trim lets go; appends go on in between.
_TRIM_COUNT: Final = 4096

# Far below the largest value, which is 1 GB.
_PART_NBYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the journal of a run lies.

    Attributes:
        url: Of the database, in a form that libpq takes; without its password, which libpq reads
            from PGPASSWORD or a password file.
        schema: Of the run.
    """

    url: str
    schema: str

    def __str__(self) -> str:
        """Return what may be shown."""
        shown = conninfo_to_dict(self.url)
        host, name = shown.get("host", "localhost"), shown.get("dbname", "")
        return f"schema {self.schema} of database {name} at {host}"

    def connect(self) -> Database:
        """Connect; every statement is a transaction of its own."""
        said = conninfo_to_dict(self.url)
        ours = {key: value for key, value in _CONNECT.items() if key not in said}
        database = psycopg.connect(make_conninfo(self.url, **ours), autocommit=True)
        try:
            place = sql.SQL("SET search_path TO {}").format(sql.Identifier(self.schema))
            database.execute(place)
        except BaseException:
            database.close()
            raise
        return database


def _connect(place: Place, durability: Durability) -> Database:
    database = place.connect()
    if durability is Durability.POWER:
        database.execute("SET synchronous_commit TO on")
    return database


def _begin(place: Place, database: Database) -> None:
    """Make the schema of a run that has none."""
    with database.transaction():
        # Two hubs that begin at once: the second one finds what the first one made.
        database.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (place.schema,))
        query = "SELECT count(*) FROM pg_tables WHERE schemaname = %s"
        if _value(database, query, (place.schema,)):
            return
        name = sql.Identifier(place.schema)
        database.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        for statement in _SCHEMA:
            database.execute(sql.SQL(statement).format(format=sql.Literal(_FORMAT)))


def _value(database: Database, query: LiteralString, parameters: Sequence[object] = ()) -> Any:
    """Return the first value of the first row; None: there is no row."""
    row = database.execute(query, parameters).fetchone()
    return None if row is None else row[0]


def _row(place: Place, database: Database) -> tuple[bytes, int, int]:
    """Return identity, first and end position of a journal."""
    query = "SELECT format, identity, first_position, end_position FROM hub"
    rows = database.execute(query).fetchall()
    if len(rows) != 1 or rows[0][0] != _FORMAT:
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"{place} holds no journal of format {_FORMAT}; open it with the release that wrote "
            "it, or name another schema",
        )
    _, identity, first, end = rows[0]
    return identity, first, end


def _must_be_whole(place: Place, database: Database, first: int, end: int) -> None:
    """Refuse a journal that lacks records; each is verified when it is read."""
    query = "SELECT count(*), min(position), max(position) FROM records WHERE position >= %s"
    count, least, last = database.execute(query, (first,)).fetchone() or (0, None, None)
    if count == end - first and (not count or (least, last) == (first, end - 1)):
        return
    query = (
        "SELECT min(number) FROM generate_series(%s::bigint, %s::bigint) AS number"
        " WHERE NOT EXISTS (SELECT FROM records WHERE position = number)"
    )
    missing = _value(database, query, (first, end - 1))
    raise _damaged(place, end if missing is None else missing)


def _read(place: Place, database: Database, start: int, limit: int) -> list[bytes]:
    """Return records from a position on."""
    query = (
        "SELECT position, checksum, record FROM records WHERE position >= %s"
        " ORDER BY position LIMIT %s"
    )
    with database.cursor(binary=True) as cursor:
        rows: Any = cursor.execute(query, (start, limit))
        return verified(rows, start, partial(_damaged, place))


class _Lease:
    """Renewed by a thread with a connection of its own, until it ends or is lost."""

    def __init__(self, place: Place, epoch: int, lease_s: float) -> None:
        self.lost = Future[None]()
        self._place = place
        self._epoch = epoch
        self._lease_s = lease_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="journal lease", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _renew(self) -> None:
        renewed_s = time.monotonic()
        while not self._is_over.is_set():
            try:
                with self._place.connect() as database:
                    while not self._is_over.wait(self._lease_s / 3):
                        self._beat(database)
                        renewed_s = time.monotonic()
            except AstraflowError as error:
                self.lost.set_exception(error)
                return
            except psycopg.Error as error:
                if time.monotonic() - renewed_s > self._lease_s:
                    self.lost.set_exception(_away(self._place, error))
                    return
                self._is_over.wait(self._lease_s / 10)

    def _beat(self, database: Database) -> None:
        query = "UPDATE hub SET beat = clock_timestamp() WHERE epoch = %s"
        if not database.execute(query, (self._epoch,)).rowcount:
            raise _fenced(self._place, self._epoch)


class PostgresJournal:
    """A journal that outlives its host; one process at a time writes it."""

    def __init__(
        self,
        place: Place,
        database: Database,
        lease: _Lease,
        *,
        identity: bytes,
        epoch: int,
        bounds: tuple[int, int],
        durability: Durability,
    ) -> None:
        """Take an opened journal; use `open`."""
        self.identity = identity
        self._place = place
        self._database = database
        self._lease = lease
        self._epoch = epoch
        self.first, self.end = bounds
        self._durability = durability
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def open(
        cls, place: Place, *, durability: Durability = Durability.PROCESS, lease_s: float = 5.0
    ) -> "PostgresJournal | None":
        """Open the journal of a schema, or begin one; None: another hub has it. Blocks.

        Args:
            place: Of the journal.
            durability: POWER has commits wait for the database's disk, whatever is set there;
                PROCESS leaves that to the database.
            lease_s: A hub that was not heard of for so many seconds has lost the journal.

        Raises:
            AstraflowError: JOURNAL_FAILED when the database cannot be used or lacks records;
                retryable when it cannot be reached.
        """
        try:
            database = _connect(place, durability)
        except psycopg.Error as error:
            raise _away(place, error) from error
        try:
            _begin(place, database)
            epoch = _value(database, _TAKE, (lease_s,))
            if epoch is None:
                database.close()
                return None
            identity, first, end = _row(place, database)
            _must_be_whole(place, database, first, end)
        except psycopg.Error as error:
            database.close()
            raise _unusable(place, error) from error
        except BaseException:
            database.close()
            raise
        log.info("journal opened", place=str(place), epoch=epoch)
        lease = _Lease(place, epoch, lease_s)
        return cls(
            place,
            database,
            lease,
            identity=identity,
            epoch=epoch,
            bounds=(first, end),
            durability=durability,
        )

    async def append(self, records: Sequence[bytes]) -> int:
        """Commit records in one round trip.

        Raises:
            AstraflowError: JOURNAL_FAILED when another hub has taken the journal, which keeps
                none of them; and when the database fails or stays away, which keeps all or none.
        """
        if self._is_closed:
            raise AstraflowError(Reason.JOURNAL_FAILED, "the journal is closed")
        return await self._do(lambda: self._append(records)) if records else self.end

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        if not self.first <= start <= self.end:
            raise _not_kept(self._place, start, self.first, self.end)
        return await self._do(lambda: self._again(lambda: self._read(start, limit)))

    async def trim(self, before: int, *, spare_nbytes: int = 0) -> None:
        """Let go of every record below position `before`; their room is the database's."""
        del spare_nbytes
        before = min(before, self.end)
        while self.first < before:
            upto = min(before, self.first + _TRIM_COUNT)
            await self._do(lambda upto=upto: self._again(lambda: self._trim(upto)))
            hit(FaultPoint.TRIMMED_SOME)

    async def fenced(self) -> None:
        """Wait until another hub has taken the journal, or the database is away for too long.

        Raises:
            AstraflowError: JOURNAL_FAILED, in the end.
        """
        # The thread that sets it knows nothing of a waiter that is cancelled.
        await asyncio.shield(asyncio.wrap_future(self._lease.lost))

    async def close(self) -> None:
        """Let nothing more be appended, and the next hub begin at once."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)

    def _close(self) -> None:
        self._lease.end()
        with suppress(psycopg.Error):
            query = "UPDATE hub SET beat = NULL WHERE epoch = %s"
            self._database.execute(query, (self._epoch,))
        self._database.close()

    async def _do(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except psycopg.Error as error:
            raise _unusable(self._place, error) from error

    def _append(self, records: Sequence[bytes]) -> int:
        start, count = self.end, len(records)
        sums = checksums(records, start)
        named = {
            "start": start,
            "count": count,
            "epoch": self._epoch,
            "checksums": sums,
            "records": list(records),
        }
        done = self._again(lambda: self._database.execute(_APPEND, named).rowcount)
        if done != count:
            # Another hub has the journal, or they were written before the connection broke.
            self._again(lambda: self._must_hold(start, sums))
        hit(FaultPoint.JOURNAL_COMMITTED)
        self.end += count
        return start

    def _must_hold(self, start: int, sums: Sequence[int]) -> None:
        """Refuse to go on unless the journal is ours and ends with records of these checksums."""
        if _value(self._database, "SELECT epoch FROM hub") != self._epoch:
            raise _fenced(self._place, self._epoch)
        query = "SELECT checksum FROM records WHERE position >= %s ORDER BY position"
        if [row[0] for row in self._database.execute(query, (start,))] != list(sums):
            raise _damaged(self._place, start)

    def _again(self, work: Callable[[], Result]) -> Result:
        """Do something, with a new connection when this one breaks, until the lease is lost."""
        while True:
            try:
                return work()
            except psycopg.Error as error:
                if self._is_closed or not self._database.closed:
                    raise
                log.warning("the connection to the journal broke", error=_line(error))
                self._reconnect()

    def _reconnect(self) -> None:
        while True:
            with suppress(psycopg.Error):
                self._database = _connect(self._place, self._durability)
                return
            with suppress(TimeoutError):
                self._lease.lost.result(timeout=_RECONNECT_S)

    def _read(self, start: int, limit: int) -> list[bytes]:
        if not self._is_closed:
            return _read(self._place, self._database, start, limit)
        with self._place.connect() as database:
            return _read(self._place, database, start, limit)

    def _trim(self, before: int) -> None:
        self._database.execute(_TRIM, {"before": before, "epoch": self._epoch})
        self.first = before


class PostgresReader:
    """The records that a journal has when this is made."""

    def __init__(self, place: Place) -> None:
        self._place = place
        with _usable(place):
            self._database = place.connect()
        try:
            with _usable(place):
                self.identity, self.first, self.end = _row(place, self._database)
        except BaseException:
            self._database.close()
            raise

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        limit = min(limit, self.end - start)
        with _usable(self._place):
            records = _read(self._place, self._database, start, limit)
        if len(records) < limit:
            raise _damaged(self._place, start + len(records))
        return records

    def close(self) -> None:
        self._database.close()


class PostgresSnapshot:
    """The snapshot of a run, beside its journal."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __str__(self) -> str:
        """Return where it is, for people."""
        return f"the snapshot in {self._place}"

    def write(self, data: bytes, *, identity: bytes, position: int) -> None:
        """Replace what was written before; one that goes further is left as it is."""
        # One part at least, also of nothing.
        starts = range(0, max(1, len(data)), _PART_NBYTES)
        with _usable(self._place), self._place.connect() as database, database.transaction():
            # A hub that was fenced may have left a process that is still at it.
            database.execute("LOCK TABLE snapshot IN SHARE ROW EXCLUSIVE MODE")
            if (_value(database, "SELECT max(position) FROM snapshot") or 0) > position:
                return
            database.execute("DELETE FROM snapshot")
            for part, start in enumerate(starts):
                # A slice is a copy, and a part is small.
                piece = data[start : start + _PART_NBYTES]
                row = (part, position, identity, crc32(piece), piece)
                database.execute("INSERT INTO snapshot VALUES (%s, %s, %s, %s, %b)", row)

    def read(self, *, identity: bytes) -> bytes | None:
        query = "SELECT part, identity, checksum, data FROM snapshot ORDER BY part"
        pieces: list[bytes] = []
        with (
            _usable(self._place),
            self._place.connect() as database,
            database.cursor(binary=True) as cursor,
        ):
            for expected, row in enumerate(cursor.execute(query)):
                part, said, crc, piece = row
                is_ours = not identity or said == identity
                if part != expected or crc != crc32(piece) or not is_ours:
                    raise AstraflowError(
                        Reason.JOURNAL_FAILED,
                        f"{self} cannot be used: it is damaged or of another journal; restore "
                        "the whole schema from one copy",
                    )
                pieces.append(piece)
        return b"".join(pieces) if pieces else None


@contextmanager
def _usable(place: Place) -> Generator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise _unusable(place, error) from error


def _unusable(place: Place, error: Exception) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{place} cannot be used ({_line(error)}); check the database, then start the hub "
        "again: nothing that was acknowledged is lost",
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _away(place: Place, error: Exception) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{place} is away ({_line(error)}); check the database, then start the hub again: "
        "nothing that was acknowledged is lost",
        retryable=True,
    )


def _fenced(place: Place, epoch: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"another hub has taken over {place}: epoch {epoch} of this one is over; it acknowledges "
        "nothing more, and members find the other one; start it again with --standby",
        metadata={"epoch": str(epoch)},
    )


def _damaged(place: Place, position: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"{place} is damaged at record {position}; restore the whole schema from one copy, or name "
        "another one to begin the run anew from the trainer's last checkpoint",
        metadata={"position": str(position)},
    )


def _not_kept(place: Place, start: int, first: int, end: int) -> AstraflowError:
    return AstraflowError(
        Reason.JOURNAL_FAILED,
        f"position {start} is not kept; {place} has {first} to {end}, and its snapshot is missing "
        "or an older copy; restore the whole schema from one copy",
    )
