"""Real processes that start fast: forked from a server that has imported all they need."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

import structlog

_CONTEXT: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["fault_ends.relays", "fault_ends.killed_pullers", "fault_ends.messages"]
)


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Generator[tuple[BaseProcess, Connection]]:
    """Run a target with one end of a pipe, then these arguments; kill it at the end."""
    _start_server()
    near, far = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=_quietly, args=(target, far, *args), daemon=True)
    child.start()
    far.close()
    try:
        yield child, near
    finally:
        child.kill()
        child.join()
        near.close()
        child.close()


@cache
def _start_server() -> None:
    """Start the server with the path of this process, without which it finds no `fault_ends`."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def quiet() -> None:
    """Keep what the weight plane logs to itself: every fault is one, and all are counted."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _quietly(target: Callable[..., None], *args: Any) -> None:
    quiet()
    target(*args)
