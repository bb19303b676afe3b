import asyncio

import pytest

from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.concurrency import Backoff, Liveness, Retry

QUICK = Backoff(first_s=0.0, limit_s=0.0)
ERROR = AstraflowError(Reason.NOT_READY, "the hub is away")


def test_pauses_double_up_to_a_limit_and_never_vanish():
    backoff = Backoff(first_s=0.1, limit_s=1.0)
    for attempt, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (5, 1.0), (99, 1.0)):
        assert longest / 2 <= backoff.pause_s(attempt) <= longest


async def test_failures_in_a_row_are_borne_until_the_limit():
    clock = ManualClock()
    retry = Retry(10.0, backoff=QUICK, clock=clock)
    for _ in range(3):
        await retry.pause(ERROR)
        clock.advance(3.5)
    with pytest.raises(AstraflowError, match="the hub is away"):
        await retry.pause(ERROR)


async def test_a_success_starts_the_limit_anew():
    clock = ManualClock()
    retry = Retry(10.0, backoff=QUICK, clock=clock)
    for _ in range(5):
        await retry.pause(ERROR)
        clock.advance(9.0)
        retry.reset()


async def test_what_a_caller_slept_through_does_not_count():
    clock = ManualClock()
    retry = Retry(10.0, backoff=QUICK, clock=clock)
    for _ in range(5):
        asyncio.get_running_loop().call_soon(clock.advance, 9.0)
        await retry.pause(ERROR)


async def test_a_peer_that_others_hear_from_is_borne_ten_times_as_long():
    clock, liveness = ManualClock(), Liveness()
    retry = Retry(10.0, backoff=QUICK, clock=clock, liveness=liveness)
    for _ in range(11):
        await retry.pause(ERROR, is_away=True)
        clock.advance(9.0)
        liveness.heard_s = clock.monotonic()
    clock.advance(2.0)
    with pytest.raises(AstraflowError, match="the hub is away"):
        await retry.pause(ERROR, is_away=True)


async def test_a_peer_that_answers_with_failures_is_borne_until_the_limit():
    clock, liveness = ManualClock(), Liveness()
    retry = Retry(10.0, backoff=QUICK, clock=clock, liveness=liveness)
    await retry.pause(ERROR)
    clock.advance(10.5)
    liveness.heard_s = clock.monotonic()
    with pytest.raises(AstraflowError, match="the hub is away"):
        await retry.pause(ERROR)
