import asyncio

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.concurrency import Outbox


async def test_a_waiting_reader_gets_all_of_one_turn_at_once():
    outbox: Outbox[int] = Outbox()
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(outbox.take())
        await asyncio.sleep(0)
        for number in range(100):
            outbox.put(number)
    assert reader.result() == list(range(100))
    assert len(outbox) == 0


class Peer:
    """Takes items until it breaks."""

    def __init__(self, breaks_at=None):
        self.got = []
        self.breaks_at = breaks_at

    async def write(self, item):
        if item == self.breaks_at:
            raise ConnectionError(item)
        self.got.append(item)


async def test_what_was_not_delivered_waits_for_the_next_reader_and_comes_first():
    outbox: Outbox[int] = Outbox()
    for number in range(4):
        outbox.put(number)
    first, second = Peer(breaks_at=2), Peer()
    with pytest.raises(ConnectionError):
        await outbox.deliver(first.write)
    outbox.put(9)
    outbox.close()
    await outbox.deliver(second.write)
    assert (first.got, second.got) == ([0, 1], [2, 3, 9])


async def test_what_was_cleared_while_it_was_written_does_not_come_back():
    outbox: Outbox[int] = Outbox()
    for number in range(3):
        outbox.put(number)

    async def clear_and_break(item):
        outbox.clear()
        outbox.put(7)
        raise ConnectionError(item)

    with pytest.raises(ConnectionError):
        await outbox.deliver(clear_and_break)
    assert await outbox.take() == [7]


async def test_a_closed_outbox_gives_what_is_left_and_then_nothing():
    outbox: Outbox[int] = Outbox()
    outbox.put(1)
    outbox.close()
    outbox.put(2)
    assert await outbox.take() == [1]
    assert await outbox.take() == []


async def test_a_close_wakes_the_reader_with_its_error():
    outbox: Outbox[int] = Outbox()
    with pytest.RaisesGroup(AstraflowError) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(outbox.take())
            await asyncio.sleep(0)
            outbox.close(AstraflowError(Reason.SESSION_ENDED, "gone"))
    assert caught.value.exceptions[0].reason is Reason.SESSION_ENDED


async def test_a_reader_that_gave_up_loses_nothing():
    outbox: Outbox[int] = Outbox()
    reader = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    outbox.put(1)
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await outbox.take() == [1]


async def test_a_reader_on_its_way_out_leaves_the_wake_up_to_the_next():
    outbox: Outbox[int] = Outbox()
    older = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    older.cancel()
    with pytest.raises(asyncio.CancelledError):
        await older
    outbox.put(1)
    assert await newer == [1]


async def test_what_comes_back_wakes_a_reader_that_waits_already():
    """A new stream of a member may be there before the one that it replaces is out."""
    outbox: Outbox[int] = Outbox()
    outbox.put(1)
    older = asyncio.ensure_future(outbox.deliver(lambda _: asyncio.Event().wait()))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    older.cancel()
    assert await newer == [1]
