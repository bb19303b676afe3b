"""What the hub removes of the payload store, and what never."""

import asyncio

import pytest

from astraflow.client.payloads import MARKER
from astraflow.core.clock import ManualClock
from astraflow.core.rollouts import PayloadStore
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.rpc.concurrency import beside
from astraflow.storage.buckets import Bucket

pytest.importorskip("fsspec")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture(params=["file", "memory"])
async def cleaner(request, tmp_path, clock):
    folder = tmp_path if request.param == "file" else f"cleaner{tmp_path}"
    store = PayloadStore(url=f"{request.param}://{folder}/run", above_nbytes=1)
    cleaner = PayloadCleaner(store, clock=clock, unnamed_s=60)
    await cleaner.open()
    return cleaner


@pytest.fixture
def bucket(cleaner):
    bucket = Bucket(cleaner.store.url)
    for name in "abc":
        bucket.write(name, b"1")
    return bucket


async def test_what_nobody_names_for_long_is_removed_and_what_is_named_never(
    cleaner, bucket, clock
):
    await cleaner.look(lambda: {"a"})
    clock.advance(59)
    bucket.write("late", b"1")
    await cleaner.look(lambda: {"a"})
    assert bucket.names() == sorted(["a", "b", "c", "late", MARKER])
    # A node that was cut off for a minute names it after all.
    clock.advance(1)
    await cleaner.look(lambda: {"a", "b"})
    assert bucket.names() == sorted(["a", "b", "late", MARKER])
    clock.advance(600)
    await cleaner.look(lambda: {"a", "b"})
    assert bucket.names() == sorted(["a", "b", MARKER])
    assert cleaner.removed_count == 2


async def test_a_hub_that_comes_back_counts_from_then(cleaner, bucket, clock):
    await cleaner.look(set)
    clock.advance(600)
    again = PayloadCleaner(cleaner.store, clock=clock, unnamed_s=60)
    await again.look(set)
    assert "a" in bucket.names()
    clock.advance(60)
    await again.look(set)
    assert bucket.names() == [MARKER]


async def test_what_is_released_is_removed_at_once(cleaner, bucket):
    async with beside(cleaner.run(lambda: {"c"})):
        cleaner.release(["a", "never", "b"])
        async with asyncio.timeout(20):
            while bucket.names() != ["c", MARKER]:  # noqa: ASYNC110 - a bucket tells nobody
                await asyncio.sleep(0)


async def test_what_a_run_leaves_is_removed_at_its_end(cleaner, bucket):
    await cleaner.clear()
    assert bucket.names() == []
    await cleaner.clear()
