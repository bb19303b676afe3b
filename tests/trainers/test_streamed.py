"""A loop that iterates makes one step for each call."""

import threading

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.streamed import BatchIterator


def test_a_step_is_made_when_the_next_batch_is_asked_for():
    trained, threads = [], set()

    def train():
        for batch in stream:
            threads.add(threading.current_thread())
            trained.append(batch)

    stream = BatchIterator()
    stream.start(train)
    for number in range(3):
        stream.step(number)
        assert trained == [*range(number + 1)]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_what_a_loop_raises_is_raised_where_it_is_waited_for():
    def train():
        for batch in stream:
            if batch == 1:
                raise ValueError("odd shapes")

    stream = BatchIterator()
    stream.start(train)
    stream.step(0)
    with pytest.raises(AstraflowError, match="ValueError: odd shapes") as caught:
        stream.step(1)
    assert caught.value.reason is Reason.INTERNAL
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(AstraflowError, match="has ended"):
        stream.step(2)


def test_a_loop_with_a_limit_makes_its_last_step_and_says_that_it_is_over():
    trained = []

    def train():
        for batch in stream:
            trained.append(batch)
            if len(trained) == 2:
                return

    stream = BatchIterator()
    stream.start(train)
    stream.step(0)
    stream.step(1)
    assert trained == [0, 1]
    with pytest.raises(AstraflowError, match="iterate without a limit"):
        stream.step(2)


def test_a_loop_that_fails_before_its_first_batch_does_not_start():
    stream = BatchIterator()
    with pytest.raises(AstraflowError, match="ZeroDivisionError"):
        stream.start(lambda: 1 / 0)
