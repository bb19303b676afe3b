"""Leaving on a signal."""

import os
import signal
import subprocess
import sys

import pytest

from astraflow.trainers.main import GracefulShutdown

WAITS_FOR_EVER = """
import queue, sys
from astraflow.trainers.main import GracefulShutdown
departure, batches = GracefulShutdown(), queue.Queue()
with departure.listening():
    for _ in departure.watch(iter(lambda: print("waiting", flush=True) or batches.get(), None)):
        pass
print("left", flush=True)
"""

JOINS_FOR_EVER = """
import queue
from contextlib import contextmanager
from astraflow.trainers.main import GracefulShutdown

@contextmanager
def joined():
    print("joining", flush=True)
    yield queue.Queue().get()

departure = GracefulShutdown()
with departure.listening(), departure.entering(joined()):
    pass
print("left", flush=True)
"""


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


@pytest.mark.parametrize("code", [WAITS_FOR_EVER, JOINS_FOR_EVER])
def test_signal_ends_a_wait(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() in {"waiting\n", "joining\n"}
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith("left\n")
    assert process.returncode == 0
