"""Snapshots are written by forks of the hub, which goes on meanwhile; a fork may fail or die."""

import asyncio
import errno
import os

import psutil
import pytest
from structlog.testing import capture_logs

from astraflow.config.loader import dump_recipe
from astraflow.core.events import MemberKeptAlive
from astraflow.core.members import RaasLoad
from astraflow.dataflow.compaction import Compaction, _Fork
from astraflow.dataflow.journals import open_reader
from astraflow.dataflow.recovery import Replica, beginning_of, catch_up
from astraflow.storage import fault_points
from astraflow.storage.fault_points import FaultPoint
from astraflow.storage.snapshot import SnapshotFile


@pytest.fixture
def recipe(recipe_of):
    return recipe_of()


@pytest.fixture
async def hub(start_hub, recipe):
    async with start_hub(recipe) as hub:
        yield hub


@pytest.fixture
async def compaction(hub, recipe):
    """Return the compaction of a hub, beside its own, which has nothing to do yet."""
    hub.run_dir.recipe.write_text(dump_recipe(recipe))
    opened = (await replayed(hub, recipe, end=1)).opened
    return Compaction(hub.hub, hub.hub.commits.journal, opened=opened, run_dir=hub.run_dir)


async def replayed(hub, recipe, *, end):
    """Return what the first records of the journal come to."""
    with open_reader(recipe, hub.run_dir) as (reader, _):
        (first,) = await reader.read(0, limit=1)
        replica = Replica.begin(first, beginning_of(recipe))
        await catch_up(replica, reader, end=end)
        return replica


def written(hub):
    return Replica.load(SnapshotFile(hub.run_dir.snapshot))


async def test_what_is_not_carried_out_yet_is_in_it(hub, recipe, compaction):
    raas = hub.raas()
    await raas.join()
    load = RaasLoad(wait_fraction=0.5)
    for _ in range(3):
        hub.hub.apply(MemberKeptAlive(member_id=raas.member_id, load=load))
    assert len(hub.hub.commits.pending) >= 3
    end = hub.hub.commits.position
    assert await compaction.write() == end
    both = written(hub), await replayed(hub, recipe, end=end)
    # Deadlines that have moved are put right when they are looked at.
    assert both[0].run.next_deadline == both[1].run.next_deadline
    assert both[0].dump() == both[1].dump()


async def test_a_hub_serves_while_many_are_written(hub, compaction):
    raas = hub.raas()
    await raas.join()

    async def speak():
        while True:
            await raas.keep_alive()

    async with asyncio.TaskGroup() as group:
        speaking = [group.create_task(speak()) for _ in range(8)]
        ends = [await compaction.write() for _ in range(20)]
        for each in speaking:
            each.cancel()
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]
    assert written(hub).position == ends[-1]


async def test_one_that_fails_says_why_and_is_followed_by_another(hub, compaction):
    hub.run_dir.snapshot.mkdir()
    with capture_logs() as logs:
        assert await compaction.write() is None
    assert f"{hub.run_dir.snapshot} cannot be written" in logs[-1]["why"]
    hub.run_dir.snapshot.rmdir()
    assert await compaction.write() == hub.hub.commits.position


@pytest.mark.parametrize(
    ("point", "is_written"),
    [(FaultPoint.SNAPSHOT_DUMPED, False), (FaultPoint.SNAPSHOT_PLACED, True)],
)
async def test_one_that_is_killed_is_followed_by_another(hub, compaction, point, is_written):
    fault_points.arm({fault_points.VARIABLE: point})
    try:
        with capture_logs() as logs:
            assert await compaction.write() is None
    finally:
        fault_points.arm({})
    assert logs[-1]["why"] == "exit code -9"
    assert hub.run_dir.snapshot.exists() is is_written
    assert await compaction.write() == hub.hub.commits.position


async def test_a_fork_holds_nothing_of_the_hub_and_ends_with_it(hub, tmp_path):
    placed, before = tmp_path / "placed", {*psutil.Process().children()}
    async with _Fork.begin(lambda may_go: may_go() and placed.touch()) as fork:
        assert await fork.is_ready()
        (process,) = {*psutil.Process().children()} - before
        assert process.net_connections() == process.open_files() == []
        # The hub comes first where they share a core.
        assert process.nice() == min(19, os.nice(0) + 5)
    assert not process.is_running()
    assert not placed.exists()


async def test_a_fork_ends_with_who_is_cancelled_while_it_begins(hub):
    before, files = {*psutil.Process().children()}, psutil.Process().num_fds()

    async def begin():
        async with _Fork.begin(lambda may_go: may_go()) as fork:
            await fork.is_ready()

    beginning = asyncio.create_task(begin())
    # Its first turn ends where it waits for the pipe.
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.wait({beginning})
    assert {*psutil.Process().children()} == before
    assert psutil.Process().num_fds() == files


async def test_a_hub_that_cannot_be_forked_goes_on_without_a_snapshot(hub, compaction, monkeypatch):
    def fork():
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    files = psutil.Process().num_fds()
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(os, "fork", fork)
        assert await compaction.write() is None
    assert "Cannot allocate memory" in logs[-1]["why"]
    assert psutil.Process().num_fds() == files
    assert await compaction.write() == hub.hub.commits.position
