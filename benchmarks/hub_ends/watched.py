"""`python watched.py LOG ARGUMENTS`: `astraflow ARGUMENTS`, its event loops looked at.

A callback that took long goes to LOG as a line of JSON, with the seconds of CPU that the thread
of its event loop spent in it: waiting for a core, or for another thread, is not in it.
"""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from astraflow.cli.main import main as main_cli
from astraflow.dataflow import main as hub

# What is shorter is not written.
_LEAST_S: Final = 0.005


def watch_callbacks(log: TextIO) -> None:
    """Note from now on how long each callback takes; asyncio has no hook for it."""
    handles: Any = asyncio.Handle
    run = handles._run  # noqa: SLF001

    def run_watched(handle: Any) -> None:
        started, started_cpu = time.perf_counter(), time.thread_time()
        run(handle)
        cpu_s = time.thread_time() - started_cpu
        if cpu_s > _LEAST_S:
            wall_s = time.perf_counter() - started
            row = {"time": started, "cpu_s": cpu_s, "wall_s": wall_s, "name": name_of(handle)}
            log.write(json.dumps(row) + "\n")

    handles._run = run_watched  # noqa: SLF001
    # That of uvloop has handles of its own.
    hub.new_loop = asyncio.new_event_loop


def name_of(handle: Any) -> str:
    """Return whose callback it is: a coroutine's name where it steps a task."""
    callback: Any = handle._callback  # noqa: SLF001
    while isinstance(callback, partial):
        callback = callback.func
    owner: Any = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        callback = owner.get_coro()
    return getattr(callback, "__qualname__", None) or repr(callback)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a", buffering=1, encoding="utf-8") as file:
        watch_callbacks(file)
        sys.argv = ["astraflow", *sys.argv[2:]]
        main_cli()
