"""A journal in PostgreSQL: what outlives a process, who may write, and what keeps it closed."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from astraflow.core.errors import TEMPORARY_EXIT, AstraflowError, Reason
from astraflow.storage.postgres import Place, PostgresJournal, PostgresReader, PostgresSnapshot
from astraflow.storage.sqlite import Durability

pytestmark = pytest.mark.postgres


@pytest.fixture
def place(postgres):
    return Place(url=postgres, schema=f"run {uuid4()}")


async def write(place, records):
    journal = PostgresJournal.open(place)
    await journal.append(records)
    await journal.close()


async def records_of(place):
    journal = PostgresJournal.open(place)
    try:
        return list(await journal.read(journal.first, limit=1000))
    finally:
        await journal.close()


def change(place, statement):
    with place.connect() as database:
        database.execute(statement)


async def test_what_was_appended_is_there_when_it_is_opened_again(place):
    await write(place, [b"a", b"b"])
    await write(place, [b"", bytes(range(256))])
    assert await records_of(place) == [b"a", b"b", b"", bytes(range(256))]


async def test_a_trim_outlives_the_process(place):
    journal = PostgresJournal.open(place)
    await journal.append([b"a"] * 10_000)
    await journal.trim(9_999)
    await journal.close()
    journal = PostgresJournal.open(place)
    assert (journal.first, journal.end) == (9_999, 10_000)
    await journal.close()


async def test_who_has_it_keeps_others_out(place):
    journal = PostgresJournal.open(place, lease_s=60)
    assert PostgresJournal.open(place, lease_s=60) is None
    await journal.close()
    assert await records_of(place) == []


async def test_a_hub_that_was_taken_over_commits_nothing_more(place):
    old = PostgresJournal.open(place)
    await old.append([b"a"])
    # Nobody has heard of it for an hour.
    change(place, "UPDATE hub SET beat = beat - interval '1 hour'")
    new = PostgresJournal.open(place)
    for attempt in (old.append([b"b"]), old.fenced()):
        with pytest.raises(AstraflowError, match="another hub has taken over") as caught:
            await attempt
        assert caught.value.reason is Reason.JOURNAL_FAILED
    await new.append([b"c"])
    await old.close()
    assert list(await new.read(0, limit=9)) == [b"a", b"c"]
    # The old one did not give away what was no longer its own.
    assert PostgresJournal.open(place) is None
    await new.close()


async def test_of_many_that_open_it_at_once_one_gets_it(place):
    opened = await asyncio.gather(
        *(asyncio.to_thread(PostgresJournal.open, place) for _ in range(8))
    )
    [journal] = [each for each in opened if each is not None]
    await journal.close()


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_damaged_record_is_refused_with_its_place(place, position):
    await write(place, [b"a", b"b", b"c"])
    change(place, f"UPDATE records SET record = 'x' WHERE position = {position}")
    with pytest.raises(AstraflowError, match=f"damaged at record {position}; restore"):
        await records_of(place)


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_missing_record_is_refused_with_its_place(place, position):
    await write(place, [b"a", b"b", b"c"])
    change(place, f"DELETE FROM records WHERE position = {position}")
    with pytest.raises(AstraflowError, match=f"damaged at record {position}; restore"):
        PostgresJournal.open(place)


async def test_a_row_too_many_is_refused(place):
    await write(place, [b"a"])
    change(place, "INSERT INTO records VALUES (7, 0, 'x')")
    with pytest.raises(AstraflowError, match="damaged at record 1"):
        PostgresJournal.open(place)


@pytest.mark.parametrize("table", ["hub", "records"])
async def test_a_lost_table_is_refused(place, table):
    await write(place, [b"a"])
    change(place, f"DROP TABLE {table}")
    with pytest.raises(AstraflowError, match="cannot be used") as caught:
        PostgresJournal.open(place)
    assert caught.value.reason is Reason.JOURNAL_FAILED


async def test_a_database_that_is_away_is_named_without_its_password(tmp_path):
    place = Place(url=f"host={tmp_path} dbname=d password=hush", schema="s")
    with pytest.raises(AstraflowError, match="check the database") as caught:
        PostgresJournal.open(place)
    assert "hush" not in caught.value.message


async def test_it_can_be_read_beside_its_writer(place):
    journal = PostgresJournal.open(place)
    await journal.append([b"a", b"b"])
    reader = PostgresReader(place)
    await journal.append([b"c"])
    assert (reader.identity, reader.first, reader.end) == (journal.identity, 0, 2)
    assert list(await reader.read(0, limit=9)) == [b"a", b"b"]
    reader.close()
    await journal.close()


async def test_a_snapshot_is_there_whole_and_never_goes_back(place, monkeypatch):
    monkeypatch.setattr("astraflow.storage.postgres._PART_NBYTES", 4)
    journal = PostgresJournal.open(place)
    snapshot, mine = PostgresSnapshot(place), journal.identity
    assert snapshot.read(identity=mine) is None
    snapshot.write(b"one, in parts", identity=mine, position=3)
    snapshot.write(b"two", identity=mine, position=5)
    # Made by a process that an old hub left.
    snapshot.write(b"late", identity=mine, position=4)
    assert snapshot.read(identity=mine) == b"two"
    snapshot.write(b"three, in parts", identity=mine, position=5)
    assert snapshot.read(identity=mine) == b"three, in parts"
    with pytest.raises(AstraflowError, match="of another journal"):
        snapshot.read(identity=b"theirs")
    change(place, "UPDATE snapshot SET data = 'x' WHERE part = 1")
    with pytest.raises(AstraflowError, match="restore the whole schema"):
        snapshot.read(identity=mine)
    await journal.close()


_APPENDS = """
import asyncio, sys
from astraflow.storage.postgres import Place, PostgresJournal

async def main():
    journal = PostgresJournal.open(Place(url=sys.argv[1], schema=sys.argv[2]))
    number = journal.end
    while True:
        await journal.append([b"%d" % n for n in range(number, number + 7)])
        number += 7
        print(number, flush=True)

asyncio.run(main())
"""


def test_what_was_appended_survives_a_kill(place):
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _APPENDS, place.url, place.schema], stdout=subprocess.PIPE
        )
        for _ in range(20):
            line = process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].split()
        promised = int((rest or [line])[-1])
        change(place, "UPDATE hub SET beat = NULL")
        records = asyncio.run(records_of(place))
        assert len(records) >= promised
        assert records == [b"%d" % n for n in range(len(records))]


async def test_appends_of_many_callers_keep_their_order(place):
    journal = PostgresJournal.open(place)
    positions = await asyncio.gather(*(journal.append([b"%d" % n]) for n in range(50)))
    assert positions == list(range(50))
    assert list(await journal.read(0, limit=50)) == [b"%d" % n for n in range(50)]
    await journal.close()


def break_connections(place):
    with psycopg.connect(place.url, autocommit=True) as database:
        others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        database.execute(f"SELECT pg_terminate_backend(pid) {others}")


@pytest.mark.parametrize("durability", Durability)
async def test_connections_that_break_cost_nothing(place, durability):
    journal = PostgresJournal.open(place, durability=durability)
    await journal.append([b"a"])
    for record in (b"b", b"c"):
        break_connections(place)
        await journal.append([record])
    break_connections(place)
    await journal.trim(1)
    break_connections(place)
    assert list(await journal.read(1, limit=9)) == [b"b", b"c"]
    await journal.close()
    assert await records_of(place) == [b"b", b"c"]


async def test_a_hub_that_was_taken_over_while_it_was_cut_off_commits_nothing(place):
    old = PostgresJournal.open(place)
    await old.append([b"a"])
    change(place, "UPDATE hub SET beat = beat - interval '1 hour'")
    new = PostgresJournal.open(place)
    await new.append([b"b"])
    break_connections(place)
    with pytest.raises(AstraflowError, match="another hub has taken over"):
        await old.append([b"b"])
    await old.close()
    assert list(await new.read(0, limit=9)) == [b"a", b"b"]
    await new.close()


class Proxy:
    """Stands between clients and a server on a socket, and cuts where it is told to."""

    def __init__(self, folder, place):
        said = conninfo_to_dict(place.url)
        name = f".s.PGSQL.{said['port']}"
        self._server = f"{said['host']}/{name}"
        self._path = folder / name
        self._wires = []
        self.swallows = asyncio.Event()  # answers go no further, and end the connection
        url = make_conninfo(place.url, host=str(folder))
        self.place = Place(url=url, schema=place.schema)

    async def __aenter__(self):
        self._listener = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *_):
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for wire in self._wires:
            wire.close()

    async def _serve(self, reader, writer):
        answers, asks = await asyncio.open_unix_connection(self._server)
        self._wires += [writer, asks]
        asking = asyncio.create_task(self._copy(reader, asks))
        while (data := await answers.read(1 << 16)) and not self.swallows.is_set():
            writer.write(data)
        self.swallows.clear()
        asking.cancel()
        writer.close()
        asks.close()

    async def _copy(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)


@pytest.fixture
def socket_folder():
    with tempfile.TemporaryDirectory(prefix="afpx") as folder:
        yield Path(folder)


async def test_a_commit_whose_answer_was_lost_is_there_once(place, socket_folder):
    async with Proxy(socket_folder, place) as proxy:
        journal = await asyncio.to_thread(PostgresJournal.open, proxy.place, lease_s=60)
        for number in range(5):
            proxy.swallows.set()
            assert await journal.append([b"%d" % number] * 2) == 2 * number
            assert not proxy.swallows.is_set()
        await journal.close()
    assert await records_of(place) == [b"%d" % number for number in range(5) for _ in range(2)]


async def test_a_database_that_stays_away_ends_the_hub_with_a_reason(place, socket_folder):
    async with Proxy(socket_folder, place) as proxy:
        journal = await asyncio.to_thread(PostgresJournal.open, proxy.place, lease_s=0.5)
        await journal.append([b"a"])
    for attempt in (journal.append([b"b"]), journal.fenced()):
        with pytest.raises(
            AstraflowError, match=r"is away \(.*nothing that was acknowledged"
        ) as caught:
            await attempt
        assert caught.value.exit_code == TEMPORARY_EXIT
    await journal.close()
    with pytest.raises(AstraflowError, match="is away") as caught:
        PostgresJournal.open(proxy.place)
    assert caught.value.retryable
    change(place, "UPDATE hub SET beat = NULL")
    assert await records_of(place) == [b"a"]
