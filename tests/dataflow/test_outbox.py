import asyncio

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.outbox import Outbox


async def test_a_waiting_reader_gets_all_of_one_turn_at_once():
    outbox: Outbox[int] = Outbox()
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(outbox.take())
        await asyncio.sleep(0)
        for number in range(100):
            outbox.put(number)
    assert reader.result() == list(range(100))
    assert len(outbox) == 0


async def test_what_was_not_delivered_comes_first():
    outbox: Outbox[int] = Outbox()
    for number in range(3):
        outbox.put(number)
    taken = await outbox.take()
    outbox.put(9)
    outbox.put_back(taken[1:])
    assert await outbox.take() == [1, 2, 9]


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
