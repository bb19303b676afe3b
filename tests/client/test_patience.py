import pytest

from astraflow.client.patience import Backoff, Patience
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason

QUICK = Backoff(first_s=0.0, limit_s=0.0)
ERROR = AstraflowError(Reason.NOT_READY, "the hub is away")


def test_pauses_double_up_to_a_limit_and_never_vanish():
    backoff = Backoff(first_s=0.1, limit_s=1.0)
    for attempt, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (5, 1.0), (99, 1.0)):
        assert longest / 2 <= backoff.pause_s(attempt) <= longest


async def test_failures_in_a_row_are_borne_until_the_limit():
    clock = ManualClock()
    patience = Patience(10.0, backoff=QUICK, clock=clock)
    for _ in range(3):
        await patience.pause(ERROR)
        clock.advance(3.5)
    with pytest.raises(AstraflowError, match="the hub is away"):
        await patience.pause(ERROR)


async def test_a_success_restores_patience():
    clock = ManualClock()
    patience = Patience(10.0, backoff=QUICK, clock=clock)
    for _ in range(5):
        await patience.pause(ERROR)
        clock.advance(9.0)
        patience.renew()
