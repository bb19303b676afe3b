"""Run a command on a machine that stands still again and again.

    sudo python scripts/starve.py -- .venv/bin/python -m pytest -m e2e

Every core is taken away from all other processes for a while, in every period, as on a host that is
shared: what fails then and not otherwise counts on time that nobody promised. For Linux; it needs
the right to real-time scheduling. The exit code is the command's.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager


@contextmanager
def starved(*, burst_s: float, period_s: float) -> Generator[None]:
    """Take all cores away for `burst_s` seconds in every `period_s` until the block ends."""
    hogs = [_hog(core, burst_s, period_s) for core in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _hog(core: int, burst_s: float, period_s: float) -> subprocess.Popen[bytes]:
    """Start a process that all others on a core give way to; its bursts are those of the others."""
    numbers = map(str, (core, burst_s, period_s))
    return subprocess.Popen([sys.executable, __file__, "--hog", *numbers])


def _take(core: int, burst_s: float, period_s: float) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    while True:
        at = time.time() % period_s
        if at >= burst_s:
            time.sleep(period_s - at)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Run a command on a machine that stands still again and again."
    )
    parser.add_argument("--burst", type=float, default=0.8, metavar="S")
    parser.add_argument("--period", type=float, default=2.5, metavar="S")
    parser.add_argument("--hog", nargs=3, type=float, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    given = parser.parse_args(arguments)
    if given.hog:
        core, burst_s, period_s = given.hog
        _take(int(core), burst_s, period_s)
    command = given.command[given.command[:1] == ["--"] :]
    if not command:
        parser.error("say after -- what to run")
    if not 0 < given.burst < given.period:
        parser.error("--burst is shorter than --period, and longer than 0")
    with starved(burst_s=given.burst, period_s=given.period):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
