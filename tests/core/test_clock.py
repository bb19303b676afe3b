"""Time as the hub has it."""

from datetime import UTC, datetime, timedelta

import pytest

from astraflow.core.clock import SteadyClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class SetClock:
    """The clock of a machine whose time of day is set at will."""

    def __init__(self):
        self.day, self.seconds = NOON, 100.0

    def now(self):
        return self.day

    def monotonic(self):
        return self.seconds


@pytest.mark.parametrize("jump", [timedelta(days=-30), timedelta(hours=1)])
def test_a_clock_that_is_set_moves_no_deadline(jump):
    machine = SetClock()
    clock = SteadyClock(machine)
    machine.day += jump
    machine.seconds += 1.5
    assert clock.now() == NOON + timedelta(seconds=1.5)
    assert clock.monotonic() == 101.5
