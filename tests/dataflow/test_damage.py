"""The damage matrix: a run whose files are damaged is as it was acknowledged, or is refused.

Three copies are made of a hub's folder while it works, each as a kill at that moment leaves it: an
early one, one before its snapshot, and one with a snapshot and records after it. Another run of
the same recipe gives files that do not belong there.
"""

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.compaction import write_snapshot_of
from astraflow.dataflow.recovery import open_run
from astraflow.launch.ledger import read_ledger
from astraflow.storage.sqlite import PAGE_NBYTES, checksum
from astraflow.wire.tasks import decode_rollout_task

DATABASE, LOG, WATERMARK = (f"journal.sqlite{end}" for end in ("", "-wal", ".watermark"))
SNAPSHOT = "snapshot"
FILES = (DATABASE, LOG, WATERMARK, SNAPSHOT)


@dataclass(frozen=True)
class Books:
    """What is acknowledged at a moment."""

    accounts: object
    rollouts: frozenset[str]
    tasks: frozenset[str]

    @classmethod
    def of(cls, run):
        rollouts = frozenset(record.rollout.rollout_id for record in run.rollouts())
        return cls(run.accounts(), rollouts, frozenset(run.open_task_ids))


@dataclass(frozen=True)
class Copies:
    recipe: Recipe
    early: Path
    whole: Path
    snapshotted: Path
    other: Path
    books: dict[Path, Books]


async def _make(root: Path, hub_in, make_recipe) -> Copies:
    recipe = make_recipe(root, policies__solver__trainer__step_count=1000, rows=400)
    books = {}
    names = ("early", "whole", "snapshotted", "other")
    early, whole, snapshotted, other = (root / name for name in names)

    async def copy(hub, to):
        await hub.hub.commits.passed()
        shutil.copytree(hub.run_dir.root / "journal", to / "journal")
        shutil.copy(hub.run_dir.recipe, to / "recipe.yaml")
        books[to] = Books.of(hub.hub.run)

    for number, folder in enumerate(("one", "two")):
        async with hub_in(root / folder, recipe) as hub:
            (hub.run_dir.root / "recipe.yaml").write_text(dump_recipe(recipe))
            trainer, raas = hub.trainer(), hub.raas(name=f"raas-{number}")
            await trainer.register()
            await trainer.publish()
            await raas.join()
            await raas.report_version("solver", 0)
            raas.live["solver"] = 0
            tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
            await raas.answer(rollouts, await _next(tasks))
            if number:
                await _snapshot(hub)
                await copy(hub, other)
                continue
            await copy(hub, early)
            await raas.answer(rollouts, await _next(tasks))
            await copy(hub, whole)
            await _snapshot(hub)
            await raas.answer(rollouts, await _next(tasks))
            await copy(hub, snapshotted)
    return Copies(recipe, early, whole, snapshotted, other, books)


async def _next(tasks):
    while not (message := await tasks.read()).HasField("task"):
        pass
    return decode_rollout_task(message.task)


async def _snapshot(hub):
    """Let a snapshot take the place of the first records, half of them."""
    end = hub.hub.commits.ticket // 2
    await write_snapshot_of(hub.run_dir, end)
    with closing(sqlite3.connect(hub.run_dir.journal)) as database, database:
        database.execute("DELETE FROM records WHERE position < ?", (end,))
        database.execute("UPDATE bounds SET first = ?", (end,))


@pytest.fixture(scope="module")
def copies(tmp_path_factory, serve_in, recipe_in):
    return asyncio.run(_make(tmp_path_factory.mktemp("damage"), serve_in, recipe_in))


def _edit(path, spoil):
    data = bytearray(path.read_bytes())
    path.write_bytes(spoil(data) or data)


def cut(name, share):
    def damage(at, copies):
        path = at / name
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def flip(name, seed):
    def damage(at, copies):
        def spoil(data):
            data[random.Random(seed).randrange(len(data))] ^= 1 << seed % 8

        _edit(at / name, spoil)

    return damage


def missing(*names):
    def damage(at, copies):
        for name in names:
            (at / name).unlink(missing_ok=True)

    return damage


def taken(whose, *names):
    """Files of another copy take their places."""

    def damage(at, copies):
        for name in names:
            source = getattr(copies, whose) / "journal" / name
            if source.exists():
                shutil.copy(source, at / name)
            else:
                (at / name).unlink(missing_ok=True)

    return damage


def zeros(name, where):
    def damage(at, copies):
        def spoil(data):
            size = min(PAGE_NBYTES, len(data))
            start = {"head": 0, "middle": (len(data) // 2) // size * size, "tail": -size}[where]
            data[start : start + size or None] = bytes(size)

        _edit(at / name, spoil)

    return damage


def emptied(name):
    return lambda at, copies: (at / name).write_bytes(b"")


def pages_swapped(at, copies):
    _checkpoint(at)

    def spoil(data):
        last = len(data) // PAGE_NBYTES - 1
        one = slice((last - 1) * PAGE_NBYTES, last * PAGE_NBYTES)
        two = slice(last * PAGE_NBYTES, (last + 1) * PAGE_NBYTES)
        data[one], data[two] = data[two], data[one]

    _edit(at / DATABASE, spoil)


def _checkpoint(at):
    with closing(sqlite3.connect(at / DATABASE)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def said(statement, **values):
    """What a statement does to the tables; :end and :first are the bounds of the records."""

    def damage(at, copies):
        with closing(sqlite3.connect(at / DATABASE)) as database, database:
            query = "SELECT min(position), max(position) + 1 FROM records"
            first, end = database.execute(query).fetchone()
            database.execute(statement, {"first": first, "end": end, **values})

    return damage


def row_again(at, copies):
    """The last record once more, sound at its place."""
    with closing(sqlite3.connect(at / DATABASE)) as database, database:
        query = "SELECT position, record FROM records ORDER BY position DESC LIMIT 1"
        position, record = database.execute(query).fetchone()
        row = (position + 1, checksum(position + 1, record), record)
        database.execute("INSERT INTO records VALUES (?, ?, ?)", row)


def torn_beyond(at, copies):
    """A record that nobody knows of, half written, far behind the end."""
    said("INSERT INTO records VALUES (1 << 40, 7, x'00')")(at, copies)


def draft_left(at, copies):
    (at / "snapshot.draft").write_bytes(b"half of a snapshot")


def disk_full_while_compacting(at, copies):
    """The process that makes a snapshot finds no room."""
    with closing(sqlite3.connect(at / DATABASE)) as database:
        (end,) = database.execute("SELECT max(position) + 1 FROM records").fetchone()
    command = [sys.executable, "-c", _WRITE_SNAPSHOT, str(at.parent), str(end)]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command], capture_output=True, check=False
    )
    assert b"AstraflowError" in done.stderr, done.stderr


_WRITE_SNAPSHOT = """
import asyncio, pathlib, sys
from astraflow.config.run_dir import RunDir
from astraflow.dataflow.compaction import write_snapshot_of
asyncio.run(write_snapshot_of(RunDir(pathlib.Path(sys.argv[1])), int(sys.argv[2])))
"""


DAMAGE = {
    "nothing": lambda at, copies: None,
    **{f"cut {n} {s}": cut(n, s) for n in FILES for s in (0.01, 0.3, 0.6, 0.97)},
    **{f"flip {n} {s}": flip(n, s) for n in FILES for s in range(8)},
    **{f"missing {n}": missing(n) for n in FILES},
    **{f"empty {n}": emptied(n) for n in FILES},
    **{f"zeros {n} {w}": zeros(n, w) for n in FILES for w in ("head", "middle", "tail")},
    **{f"other run's {n}": taken("other", n) for n in FILES},
    **{f"early {n}": taken("early", n) for n in (DATABASE, LOG, WATERMARK)},
    "early but the watermark": taken("early", DATABASE, LOG, SNAPSHOT),
    "before the snapshot": taken("whole", SNAPSHOT),
    "other run's journal": taken("other", DATABASE, LOG, WATERMARK),
    "missing watermark and log": missing(WATERMARK, LOG),
    "missing journal and log": missing(DATABASE, LOG),
    "missing journal and watermark": missing(DATABASE, WATERMARK),
    "missing but the snapshot": missing(DATABASE, LOG, WATERMARK),
    "missing but the watermark": missing(DATABASE, LOG, SNAPSHOT),
    "pages swapped": pages_swapped,
    "row missing first": said("DELETE FROM records WHERE position = :first"),
    "row missing middle": said("DELETE FROM records WHERE position = (:first + :end) / 2"),
    "row missing last": said("DELETE FROM records WHERE position = :end - 1"),
    "rows missing": said("DELETE FROM records"),
    "row again": row_again,
    "row torn middle": said("UPDATE records SET record = x'' WHERE position = (:first + :end) / 2"),
    "row torn last": said("UPDATE records SET checksum = 1 WHERE position = :end - 1"),
    "row moved far": said("UPDATE records SET position = 1 << 40 WHERE position = :end - 1"),
    "row moved below": said("UPDATE records SET position = -9 WHERE position = :end - 1"),
    "torn beyond": torn_beyond,
    "bounds missing": said("DELETE FROM bounds"),
    "bounds twice": said("INSERT INTO bounds VALUES (0)"),
    "bounds high": said("UPDATE bounds SET first = :end + 9"),
    "bounds text": said("UPDATE bounds SET first = 'x'"),
    "records dropped": said("DROP TABLE records"),
    "identity other": said("UPDATE identity SET id = randomblob(16)"),
    "identity missing": said("DELETE FROM identity"),
    "draft left": draft_left,
    "disk full while compacting": disk_full_while_compacting,
}
# What is repaired, or does no harm: these go on.
SOUND = ("nothing", "draft left", "disk full while compacting", "torn beyond")


@pytest.mark.parametrize("state", ["whole", "snapshotted"])
@pytest.mark.parametrize("name", DAMAGE)
async def test_damaged_files_are_refused_or_hold_what_was_acknowledged(
    copies, tmp_path, state, name
):
    whole = getattr(copies, state)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if SNAPSHOT in name and state == "whole" and not name.startswith("before"):
        pytest.skip("there is no snapshot")
    DAMAGE[name](folder / "journal", copies)
    # Also who tries again is not served anything else.
    outcomes = [await _recovered(copies.recipe, folder) for _ in range(2)]
    for outcome in outcomes:
        if isinstance(outcome, AstraflowError):
            assert outcome.reason is Reason.JOURNAL_FAILED
            assert "restore" in outcome.message or "release" in outcome.message
            assert name not in (*SOUND, f"missing {WATERMARK}")
        else:
            assert outcome == copies.books[whole]
    if name in SOUND:
        assert (await read_ledger(RunDir(folder))).holds


async def _recovered(recipe, folder):
    try:
        recovered = await open_run(
            recipe, RunDir(folder), size_of=lambda _: 400, clock=SystemClock()
        )
    except AstraflowError as error:
        return error
    await recovered.journal.close()
    return Books.of(recovered.replica.run)
