import asyncio

import pytest

from astraflow.core.ids import MemberId
from astraflow.rpc.seats import Seats, SessionLeft, StreamReplaced

ME = MemberId("m-1")


async def sit(seats, entered, purpose="tasks"):
    with seats.take(ME, purpose):
        entered.set()
        await asyncio.Event().wait()


async def test_a_second_stream_replaces_the_first():
    seats, entered = Seats(), asyncio.Event()
    first = asyncio.ensure_future(sit(seats, entered))
    await entered.wait()
    with seats.take(ME, "tasks"):
        with pytest.raises(StreamReplaced):
            await first
        assert seats.has(ME, "tasks")
    assert not seats.has(ME, "tasks")


async def test_streams_of_other_purposes_and_members_stay():
    seats = Seats()
    events = [asyncio.Event(), asyncio.Event()]
    streams = [asyncio.ensure_future(sit(seats, e, p)) for e, p in zip(events, "ab", strict=True)]
    for event in events:
        await event.wait()
    with seats.take(MemberId("m-2"), "a"), seats.take(ME, "a"):
        assert seats.has(ME, "b")
    seats.end(ME, SessionLeft())
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(r) for r in results] == [StreamReplaced, SessionLeft]


async def test_a_cancellation_from_elsewhere_stays_one():
    seats, entered = Seats(), asyncio.Event()
    stream = asyncio.ensure_future(sit(seats, entered))
    await entered.wait()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert not seats.has(ME, "tasks")


async def test_a_task_that_lost_its_seat_can_go_on():
    seats = Seats()

    async def body():
        try:
            with seats.take(ME, "tasks"):
                await asyncio.Event().wait()
        except StreamReplaced:
            await asyncio.sleep(0)
            return "said goodbye"

    first = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    with seats.take(ME, "tasks"):
        assert await first == "said goodbye"
