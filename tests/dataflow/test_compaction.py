"""Snapshots are made by a process beside the hub, which may be too slow or fail."""

import psutil
import pytest

from astraflow.dataflow.compaction import SnapshotProcess
from astraflow.dataflow.recovery import Replica
from astraflow.storage.snapshot import SnapshotFile


@pytest.fixture
async def process(start_hub, recipe_of):
    """Return the process of a hub that does nothing but wait, and the hub."""
    async with start_hub(recipe_of()) as hub:
        process = SnapshotProcess(hub.run_dir.root)
        yield process, hub
        await process.stop()


def _position(hub) -> int:
    replica = Replica.load(SnapshotFile(hub.run_dir.snapshot))
    assert replica is not None
    return replica.position


def _beside() -> list[psutil.Process]:
    """Return the processes that write snapshots for this one."""
    return [
        each
        for each in psutil.Process().children()
        if "astraflow.dataflow.compaction" in each.cmdline()
    ]


async def test_one_process_goes_on_from_snapshot_to_snapshot(process):
    process, hub = process
    await hub.raas().join()
    first = hub.hub.commits.ticket + 1
    assert await process.write(first)
    assert _position(hub) == first
    (before,) = _beside()
    await hub.trainer().register()
    assert await process.write(first + 1)
    assert _position(hub) == first + 1
    assert _beside() == [before]


async def test_one_that_is_late_is_not_waited_for(process):
    process, hub = process
    assert not await process.write(1, is_late=lambda: True)
    (late,) = _beside()
    await process.stop(nice=0)
    assert not late.is_running()
    assert await process.write(1)
    assert _position(hub) == 1


async def test_one_that_fails_is_followed_by_another(process):
    process, hub = process
    # More than the journal has.
    assert not await process.write(1 << 40)
    assert not hub.run_dir.snapshot.exists()
    assert await process.write(1)
    assert _position(hub) == 1


async def test_it_ends_with_the_hub(process):
    process, _ = process
    assert await process.write(1)
    process._process.stdin.close()
    assert await process._process.wait() == 0
