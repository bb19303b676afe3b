"""A source that waits says so; one that has stopped is told from it."""

import asyncio
import time
from contextlib import aclosing, suppress

import pytest

from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.heartbeat import StallTimeouts, StallWatch, watched, with_heartbeats
from astraflow.wire.transfers import TransferPlan, Waiting

PLAN = TransferPlan(patches=(), chunk_count=0, payload_nbytes=0)


async def after(event, *items):
    for item in items:
        yield item
    await event.wait()


def watch(clock=None, **timeouts):
    return StallWatch(
        "a:1", StallTimeouts(**timeouts), answer_s=0.0, goodput_bytes_per_s=0.0, clock=clock
    )


async def test_who_has_nothing_to_send_says_so_and_loses_no_item():
    event = asyncio.Event()

    async def items():
        yield 1
        await event.wait()
        yield 2

    seen = []
    async for item in with_heartbeats(items(), every_s=0.01):
        seen.append(item)
        if seen.count(Waiting()) == 2:
            event.set()
    assert seen[0] == 1
    assert seen[-1] == 2
    assert set(seen[1:-1]) == {Waiting()}


async def test_an_error_passes_and_what_is_given_up_is_closed():
    closed = []

    async def items():
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async with aclosing(with_heartbeats(items(), every_s=0.01)) as signed:
        await anext(signed)
        assert await anext(signed) == Waiting()
    assert closed

    async def failing():
        raise AstraflowError(Reason.VERSION_EVICTED, "gone")
        yield

    with pytest.raises(AstraflowError, match="gone"):
        await anext(with_heartbeats(failing()))


async def test_a_source_without_a_sign_has_stalled():
    items = watched(after(asyncio.Event(), PLAN), watch(silent_s=0.05, first_s=5.0))
    assert await anext(items) == PLAN
    with pytest.raises(AstraflowError) as caught:
        await anext(items)
    assert caught.value.reason is Reason.SOURCE_TIMEOUT


async def test_signs_without_end_and_without_a_chunk_are_a_stall_too():
    async def signs():
        while True:
            yield Waiting()
            await asyncio.sleep(0.005)

    with pytest.raises(AstraflowError, match="no chunk for"):
        await anext(watched(signs(), watch(silent_s=5.0, first_s=5.0, idle_s=0.05)))


async def test_nobody_is_blamed_for_what_the_watcher_slept_through():
    clock = ManualClock()
    event = asyncio.Event()
    items = watched(after(event, PLAN), watch(clock, silent_s=0.01, first_s=0.01))
    assert await anext(items) == PLAN
    rest = asyncio.create_task(_end(items))
    clock.advance(60.0)  # a machine that was suspended
    event.set()
    await rest


async def test_a_short_standstill_of_the_watcher_is_not_silence_of_the_source():
    """What came while he stood still may need some turns of his event loop to be read."""
    event = asyncio.Event()
    items = watched(after(event, PLAN), watch(silent_s=0.4, first_s=0.4))
    assert await anext(items) == PLAN
    rest = asyncio.create_task(_end(items))
    await asyncio.sleep(0.01)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still
    for _ in range(5):
        await asyncio.sleep(0)
    event.set()
    await rest


async def test_what_is_done_with_a_chunk_is_not_silence_of_the_source():
    async def one():
        yield PLAN
        await asyncio.sleep(0.02)

    items = watched(one(), watch(silent_s=0.4, first_s=5.0))
    assert await anext(items) == PLAN
    await asyncio.sleep(0.5)
    await _end(items)


async def _end(items):
    async for _ in items:
        pass


async def test_who_is_cancelled_while_a_source_is_closed_is_cancelled():
    closing, closed = asyncio.Event(), asyncio.Event()

    async def items():
        try:
            yield PLAN
            await asyncio.Event().wait()
        finally:
            closing.set()
            await closed.wait()

    async def pull():
        with suppress(AstraflowError):
            await _end(watched(items(), watch(silent_s=0.01, first_s=5.0)))

    pulling = asyncio.create_task(pull())
    await closing.wait()
    pulling.cancel()
    await asyncio.wait([pulling], timeout=0)
    closed.set()
    await asyncio.wait([pulling])
    assert pulling.cancelled()


def test_who_is_far_or_slow_gets_more_time():
    timeouts = StallTimeouts(silent_s=1.0)
    near = StallWatch("a:1", timeouts, answer_s=0.01, goodput_bytes_per_s=1e9)
    far = StallWatch("a:1", timeouts, answer_s=0.5, goodput_bytes_per_s=1e9)
    assert near.left_s <= 1.0 < 1.5 < far.left_s
