import asyncio

import pytest

from astraflow.core.ids import MemberId
from astraflow.rpc.streams import StreamClosed, StreamRegistry, StreamReplaced

ME = MemberId("m-1")


async def open_stream(registry, entered, purpose="tasks"):
    with registry.open(ME, purpose):
        entered.set()
        await asyncio.Event().wait()


async def test_a_second_stream_replaces_the_first():
    registry, entered = StreamRegistry(), asyncio.Event()
    first = asyncio.ensure_future(open_stream(registry, entered))
    await entered.wait()
    with registry.open(ME, "tasks"):
        with pytest.raises(StreamReplaced):
            await first
        assert registry.has(ME, "tasks")
    assert not registry.has(ME, "tasks")


async def test_streams_of_other_purposes_and_members_stay():
    registry = StreamRegistry()
    events = [asyncio.Event(), asyncio.Event()]
    streams = [
        asyncio.ensure_future(open_stream(registry, e, p))
        for e, p in zip(events, "ab", strict=True)
    ]
    for event in events:
        await event.wait()
    with registry.open(MemberId("m-2"), "a"), registry.open(ME, "a"):
        assert registry.has(ME, "b")
    registry.end(ME, StreamClosed())
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(r) for r in results] == [StreamReplaced, StreamClosed]


async def test_a_cancellation_from_elsewhere_stays_one():
    registry, entered = StreamRegistry(), asyncio.Event()
    stream = asyncio.ensure_future(open_stream(registry, entered))
    await entered.wait()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert not registry.has(ME, "tasks")


async def test_a_task_that_lost_its_seat_can_go_on():
    registry = StreamRegistry()

    async def body():
        try:
            with registry.open(ME, "tasks"):
                await asyncio.Event().wait()
        except StreamReplaced:
            await asyncio.sleep(0)
            return "said goodbye"

    first = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    with registry.open(ME, "tasks"):
        assert await first == "said goodbye"
