import asyncio
from contextlib import suppress

from astraflow.core.status import WaitCause, WaitReason
from astraflow.dataflow.stream_outboxes import explain_waits
from astraflow.rpc.concurrency import Outbox

REASON = WaitReason(cause=WaitCause.NO_RAAS, waiter_id="solver")


async def test_a_quiet_stream_is_told_why():
    outbox: Outbox = Outbox()

    async def explain():
        return [REASON]

    telling = asyncio.ensure_future(explain_waits(outbox, explain, interval_s=0))
    assert await outbox.take() == [REASON]
    assert await outbox.take() == [REASON]
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling


async def test_a_stream_that_got_something_is_left_alone():
    outbox: Outbox = Outbox()
    looked = []

    async def explain():
        looked.append(len(outbox))
        return []

    telling = asyncio.ensure_future(explain_waits(outbox, explain, interval_s=0))
    await asyncio.sleep(0)
    outbox.put("batch")
    await asyncio.sleep(0)
    assert not looked
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling


async def test_a_peer_that_does_not_read_is_told_once():
    outbox: Outbox = Outbox()

    async def explain():
        return [REASON]

    telling = asyncio.ensure_future(explain_waits(outbox, explain, interval_s=0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(outbox) == 1
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
