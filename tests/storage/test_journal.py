"""The contract of every journal; a new one joins with one line in JOURNALS."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.journal import InMemoryJournal, Journal
from astraflow.storage.postgres import Place, PostgresJournal
from astraflow.storage.sqlite import Durability, SqliteJournal

JOURNALS: dict[str, Callable[[Path], Journal]] = {
    "memory": lambda _: InMemoryJournal(),
    "sqlite": SqliteJournal.open,
    "sqlite_power": lambda path: SqliteJournal.open(path, durability=Durability.POWER),
}

# At the URL of a database.
SERVED: dict[str, Callable[[str], Journal]] = {
    "postgres": lambda url: PostgresJournal.open(Place(url=url, schema=uuid4().hex)),
}


@pytest.fixture(params=[*JOURNALS, *(pytest.param(k, marks=pytest.mark.postgres) for k in SERVED)])
async def journal(request, tmp_path):
    if request.param in SERVED:
        journal = SERVED[request.param](request.getfixturevalue("postgres"))
    else:
        journal = JOURNALS[request.param](tmp_path / "journal.sqlite")
    yield journal
    await journal.close()


async def test_records_come_back_in_order(journal):
    assert await journal.append([b"a", b"b"]) == 0
    assert await journal.append([b"", b"c"]) == 2
    assert list(await journal.read(0, limit=10)) == [b"a", b"b", b"", b"c"]


async def test_a_read_is_limited_and_goes_on_where_it_ended(journal):
    await journal.append([bytes([i]) for i in range(5)])
    assert list(await journal.read(1, limit=2)) == [b"\x01", b"\x02"]
    assert list(await journal.read(3, limit=9)) == [b"\x03", b"\x04"]


async def test_reading_at_the_end_is_empty(journal):
    assert list(await journal.read(0, limit=1)) == []
    await journal.append([b"a"])
    assert list(await journal.read(1, limit=1)) == []


async def test_positions_go_on_after_a_trim(journal):
    await journal.append([b"a", b"b", b"c"])
    await journal.trim(2)
    assert (journal.first, journal.end) == (2, 3)
    assert await journal.append([b"d"]) == 3
    assert list(await journal.read(2, limit=9)) == [b"c", b"d"]


async def test_trimming_everything_keeps_the_positions(journal):
    await journal.append([b"a", b"b"])
    await journal.trim(100)
    await journal.trim(1)
    assert (journal.first, journal.end) == (2, 2)
    assert await journal.append([b"c"]) == 2


@pytest.mark.parametrize("start", [0, 1, 4])
async def test_reading_what_is_not_kept_is_an_error(journal, start):
    await journal.append([b"a", b"b", b"c"])
    await journal.trim(2)
    with pytest.raises(AstraflowError) as caught:
        await journal.read(start, limit=1)
    assert caught.value.reason is Reason.JOURNAL_FAILED


async def test_appending_nothing_changes_nothing(journal):
    assert await journal.append([]) == 0
    assert journal.end == 0


async def test_a_closed_journal_refuses_records_and_still_reads(journal):
    await journal.append([b"a"])
    await journal.close()
    await journal.close()
    with pytest.raises(AstraflowError) as caught:
        await journal.append([b"b"])
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert list(await journal.read(0, limit=1)) == [b"a"]
