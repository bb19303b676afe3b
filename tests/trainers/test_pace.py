"""When the weights of a trainer become a version."""

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from astraflow.config.recipe import Sync
from astraflow.trainers.loop import Pace, log_step


class Origin:
    def __init__(self):
        self.steps, self.is_damaged = [], False

    def publish(self, *, step):
        self.steps.append(step)
        return SimpleNamespace(step=step)


@pytest.fixture
def origin():
    return Origin()


@pytest.fixture
def orders():
    return []


@pytest.fixture
def make_pace(origin, orders):
    def make(last_step=None, **sync):
        is_asked = lambda: bool(orders and orders.pop())  # noqa: E731
        return Pace(origin, Sync(**sync), is_asked=is_asked, last_step=last_step)

    return make


def test_the_first_weights_are_published_and_then_those_of_every_step(make_pace, origin):
    pace = make_pace()
    for step in (1, 2, 3):
        pace.after_step(step)
        assert pace.is_fresh
    assert origin.steps == [0, 1, 2, 3]


def test_every_so_many_steps_make_one_version_and_an_order_begins_anew(make_pace, origin, orders):
    pace = make_pace(every=3)
    for step in range(1, 9):
        if step == 4:
            orders.append(True)
        pace.after_step(step)
    assert origin.steps == [0, 3, 4, 7]
    assert not pace.is_fresh
    assert pace.finish().step == 8
    assert origin.steps[-1] == 8


def test_nothing_comes_unasked_but_the_last_weights(make_pace, origin, orders):
    pace = make_pace(style="asked", last_step=4)
    assert pace.after_step(1) is None
    orders.append(True)
    assert pace.after_step(2).step == 2
    assert pace.after_step(3) is None
    assert pace.after_step(4).step == 4
    assert origin.steps == [0, 2, 4]
    assert pace.finish().step == 4
    assert origin.steps == [0, 2, 4]


def test_who_waits_publishes_what_is_new_when_asked_and_nothing_twice(make_pace, origin, orders):
    pace = make_pace(style="asked")
    orders.append(True)
    pace.carry_out_orders()
    pace.after_step(1)
    pace.carry_out_orders()
    assert origin.steps == [0]
    orders.append(True)
    pace.carry_out_orders()
    assert origin.steps == [0, 1]


def test_weights_that_were_lost_are_published_again(make_pace, origin, orders):
    pace = make_pace()
    pace.after_step(1)
    origin.is_damaged = True
    orders.append(True)
    pace.carry_out_orders()
    origin.is_damaged = False
    pace.finish()
    assert origin.steps == [0, 1, 1]


def test_the_log_says_of_how_many_steps_each_is():
    with capture_logs() as lines:
        for last_step in (500, None):
            log_step(37, {}, last_step=last_step, wait_s=0, train_s=1)
    assert [(line["step"], line.get("of")) for line in lines] == [(37, 500), (37, None)]
