"""What outlives a process, what is cut, and what keeps a journal closed."""

import asyncio
import errno
import fcntl
import os
import resource
import signal
import sqlite3
import subprocess
import sys

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.sqlite import Durability, SqliteJournal, open_for_reading, read_rows
from astraflow.storage.watermark import Level, Watermark, read_level, watermark_of
from crash_ends.disk import small_disk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


async def write(path, records):
    journal = SqliteJournal.open(path)
    await journal.append(records)
    await journal.close()


def spoil(path, position):
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET record = x'00' WHERE position = ?", (position,))
    database.close()


async def records_of(path):
    journal = SqliteJournal.open(path)
    try:
        return list(await journal.read(journal.first, limit=1000))
    finally:
        await journal.close()


async def test_what_was_appended_is_there_when_it_is_opened_again(path):
    await write(path, [b"a", b"b"])
    await write(path, [b"c"])
    assert await records_of(path) == [b"a", b"b", b"c"]


async def test_positions_outlive_a_trim_and_a_process(path):
    journal = SqliteJournal.open(path)
    await journal.append([b"a"] * 600)
    await journal.trim(600)
    await journal.close()
    journal = SqliteJournal.open(path)
    assert (journal.first, journal.end) == (600, 600)
    assert await journal.append([b"b"]) == 600
    await journal.close()


async def test_a_trim_gives_its_room_back_to_the_disk(path):
    journal = SqliteJournal.open(path)
    for _ in range(20):
        await journal.append([bytes(20_000)] * 20)
    full = path.stat().st_size
    await journal.trim(390)
    await journal.append([b"new"])
    await journal.close()
    assert path.stat().st_size < full / 10
    assert len(await records_of(path)) == 11


async def test_a_trim_keeps_room_for_what_comes(path):
    records = [bytes([number % 251]) * 20_000 for number in range(400)]
    journal = SqliteJournal.open(path)
    await journal.append(records)
    await journal.trim(400, spare_nbytes=4_000_000)
    await journal.close()
    spare = path.stat().st_size
    assert 4_000_000 <= spare < 5_000_000
    await write(path, records[:100])
    assert path.stat().st_size == spare


async def test_one_process_at_a_time_writes(path):
    journal = SqliteJournal.open(path)
    with pytest.raises(AstraflowError, match="stop the other one first"):
        SqliteJournal.open(path)
    await journal.close()
    await write(path, [b"a"])


async def test_a_file_system_without_locks_is_named(path, monkeypatch):
    def has_none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", has_none)
    with pytest.raises(AstraflowError, match=r"cannot be locked \(.*No locks available"):
        SqliteJournal.open(path)


async def test_it_can_be_read_beside_its_writer(path):
    journal = SqliteJournal.open(path)
    await journal.append([b"a", b"b"])
    database = open_for_reading(path)
    assert read_rows(path, database, 0, 10) == [b"a", b"b"]
    database.close()
    await journal.close()


def acknowledge(path, end):
    """Have the watermark of a journal say less than it holds, as after a kill before it rose."""
    Watermark(path, Level(read_level(path).identity, end)).close()


async def test_a_torn_tail_that_nobody_knows_of_is_cut(path):
    await write(path, [b"a", b"b", b"c"])
    spoil(path, 2)
    acknowledge(path, 2)
    assert await records_of(path) == [b"a", b"b"]
    await write(path, [b"d"])
    assert await records_of(path) == [b"a", b"b", b"d"]


async def test_a_torn_record_that_was_acknowledged_is_refused(path):
    await write(path, [b"a", b"b", b"c"])
    spoil(path, 2)
    with pytest.raises(AstraflowError, match="damaged at record 2"):
        await records_of(path)


@pytest.mark.parametrize("key", [1 << 40, -7])
async def test_a_torn_row_with_a_far_key_leaves_no_gap(path, key):
    await write(path, [b"a", b"b", b"c"])
    acknowledge(path, 2)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET position = ? WHERE position = 2", (key,))
    database.close()
    assert await records_of(path) == [b"a", b"b"]
    await write(path, [b"d"])
    assert await records_of(path) == [b"a", b"b", b"d"]


async def test_a_journal_of_an_earlier_release_gets_a_watermark(path):
    await write(path, [b"a", b"b"])
    watermark_of(path).unlink()
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE identity")
    database.close()
    await write(path, [b"c"])
    assert read_level(path).end == 3


async def test_damage_before_the_end_is_refused_with_its_place(path):
    await write(path, [b"a", b"b", b"c"])
    spoil(path, 1)
    with pytest.raises(AstraflowError, match=r"damaged at record 1, before its end; restore"):
        await records_of(path)


async def test_a_missing_record_is_refused(path):
    await write(path, [b"a", b"b", b"c"])
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM records WHERE position = 1")
    database.close()
    with pytest.raises(AstraflowError, match="damaged at record 1"):
        await records_of(path)


async def test_a_journal_without_one_sound_record_is_refused(path):
    await write(path, [b"a", b"b"])
    spoil(path, 0)
    spoil(path, 1)
    with pytest.raises(AstraflowError, match="damaged at record 0"):
        SqliteJournal.open(path)


@pytest.mark.parametrize("content", [b"no database at all, and longer than a header" * 4])
def test_another_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(AstraflowError) as caught:
        SqliteJournal.open(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert path.read_bytes() == content


def test_a_database_of_somebody_else_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(AstraflowError, match="no journal of format 1"):
        SqliteJournal.open(path)


async def test_a_cut_file_is_refused_or_holds_what_it_says(path):
    await write(path, [bytes(5000)] * 50)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(AstraflowError) as caught:
        await records_of(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED


_APPENDS = """
import asyncio, sys
from pathlib import Path
from astraflow.storage.sqlite import SqliteJournal
from astraflow.storage.sqlite import Durability

async def main():
    journal = SqliteJournal.open(Path(sys.argv[1]), durability=Durability(sys.argv[2]))
    number = journal.end
    while True:
        await journal.append([b"%d" % n for n in range(number, number + 7)])
        number += 7
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("durability", list(Durability))
def test_what_was_appended_survives_a_kill(path, durability):
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _APPENDS, str(path), durability], stdout=subprocess.PIPE
        )
        for _ in range(20):
            line = process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].split()
        promised = int((rest or [line])[-1])
        records = asyncio.run(records_of(path))
        assert len(records) >= promised
        assert records == [b"%d" % n for n in range(len(records))]


_FILLS = """
import asyncio, resource, signal, sys
from pathlib import Path
from astraflow.core.errors import AstraflowError
from astraflow.storage.sqlite import SqliteJournal

async def main():
    journal = SqliteJournal.open(Path(sys.argv[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    count = 0
    try:
        while True:
            await journal.append([bytes(9000)])
            count += 1
    except AstraflowError as error:
        print(count, error.reason, error.message)

asyncio.run(main())
"""


def test_a_full_disk_is_an_error_that_says_what_to_do_and_loses_nothing(path):
    done = subprocess.run(
        [sys.executable, "-c", _FILLS, str(path)], capture_output=True, text=True, check=True
    )
    count, reason, message = done.stdout.split(maxsplit=2)
    assert int(count) > 0
    assert reason == Reason.JOURNAL_FAILED
    assert "make room" in message
    assert len(asyncio.run(records_of(path))) == int(count)


async def test_a_journal_that_is_closed_on_a_full_disk_is_let_go_of(path):
    journal = SqliteJournal.open(path)
    await journal.append([b"one" * 1000])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Nothing can be written at any place of a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(AstraflowError, match="make room"):
            await journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = SqliteJournal.open(path)
    assert again.end == 1
    await again.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AstraflowError, match="make its folder writable") as caught:
        SqliteJournal.open(tmp_path / "file" / "journal.sqlite")
    assert caught.value.reason is Reason.JOURNAL_FAILED


async def test_a_read_only_disk_is_named(tmp_path):
    folder = tmp_path / "disk"
    try:
        with small_disk(folder, nbytes=1 << 22) as disk:
            disk.protect()
            with pytest.raises(AstraflowError, match="writable") as caught:
                SqliteJournal.open(folder / "journal.sqlite")
            assert caught.value.reason is Reason.JOURNAL_FAILED
            disk.permit()
            await write(folder / "journal.sqlite", [b"a"])
    except PermissionError as error:
        pytest.skip(str(error))


async def test_appends_of_many_callers_keep_their_order(path):
    journal = SqliteJournal.open(path)
    positions = await asyncio.gather(*(journal.append([b"%d" % n]) for n in range(50)))
    assert positions == list(range(50))
    assert list(await journal.read(0, limit=50)) == [b"%d" % n for n in range(50)]
    await journal.close()
