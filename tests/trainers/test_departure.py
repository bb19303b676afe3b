"""Leaving on a signal."""

import os
import signal
import sys

import pytest

from astraflow.trainers.main import GracefulShutdown


def test_items_pass_through_until_there_are_none():
    assert list(GracefulShutdown().watch([1, 2, 3])) == [1, 2, 3]


def test_signal_during_a_step_lets_it_end():
    departure, done = GracefulShutdown(), []
    with departure.listening():
        for item in departure.watch([1, 2, 3]):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(item)
    assert done == [1]


def test_signal_right_after_an_item_came_ends_without_an_error():
    departure, done = GracefulShutdown(), []

    def tracing(frame, event, _):
        if event == "line" and frame.f_locals.get("item") == 1 and not departure.is_requested:
            signal.raise_signal(signal.SIGTERM)
        return tracing if frame.f_code is GracefulShutdown.watch.__code__ else None

    with departure.listening():
        sys.settrace(tracing)
        try:
            done += departure.watch([1, 2, 3])
        finally:
            sys.settrace(None)
    assert done == []


def test_second_signal_stops_at_once():
    with GracefulShutdown().listening():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_old_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with GracefulShutdown().listening():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("wait", ["wait_for_a_batch", "wait_to_join"])
def test_signal_ends_a_wait(wait, nursery, run_apart):
    with run_apart(wait) as said:
        process = int(said.readline())
        os.kill(process, signal.SIGTERM)
        assert said.read().endswith("left\n")
    assert nursery.wait(process) == 0
