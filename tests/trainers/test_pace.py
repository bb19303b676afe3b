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
def make_pace(origin):
    def make(last_step=None, **sync):
        return Pace(origin, Sync(**sync), last_step=last_step)

    return make


def test_the_first_weights_are_published_and_then_those_of_every_step(make_pace, origin):
    pace = make_pace()
    for step in (1, 2, 3):
        pace.after_step(step)
        assert pace.is_fresh
    assert origin.steps == [0, 1, 2, 3]


def test_every_so_many_steps_make_one_version_and_an_order_begins_anew(make_pace, origin):
    pace = make_pace(every=3)
    for step in range(1, 9):
        pace.after_step(step)
        if step == 4:
            pace.publish()
    assert origin.steps == [0, 3, 4, 7]
    assert not pace.is_fresh
    assert pace.publish().step == 8
    assert origin.steps[-1] == 8


def test_nothing_comes_unasked_but_the_last_weights(make_pace, origin):
    pace = make_pace(style="asked", last_step=4)
    assert pace.after_step(1) is None
    assert pace.after_step(2) is None
    assert pace.publish().step == 2
    assert pace.after_step(3) is None
    assert pace.after_step(4).step == 4
    assert origin.steps == [0, 2, 4]
    assert pace.publish() is None


def test_who_is_asked_publishes_what_is_new_and_nothing_twice(make_pace, origin):
    pace = make_pace(style="asked")
    pace.publish()
    pace.after_step(1)
    assert origin.steps == [0]
    pace.publish()
    assert origin.steps == [0, 1]


def test_weights_that_were_lost_are_published_again(make_pace, origin):
    pace = make_pace()
    pace.after_step(1)
    origin.is_damaged = True
    pace.publish()
    origin.is_damaged = False
    pace.publish()
    assert origin.steps == [0, 1, 1]


def test_the_log_says_of_how_many_steps_each_is():
    with capture_logs() as lines:
        for last_step in (500, None):
            log_step(37, {}, last_step=last_step, wait_s=0, train_s=1)
    assert [(line["step"], line.get("of")) for line in lines] == [(37, 500), (37, None)]
