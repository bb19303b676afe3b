"""Real processes that start fast: forked from one that has imported all they need.

The nursery itself has no threads and no connections, so a fork of it is as good as a fresh process.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TextIO

_ROOT = Path(__file__).parents[1]


class Nursery:
    """Starts, watches and kills processes; all of them end with the block."""

    def __init__(self, module: str) -> None:
        """Prepare to run functions of a module."""
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash_ends.nursery", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and the nursery."""
        self._process.communicate()

    def start(self, function: str, *arguments: str, output: Path | None = None) -> int:
        """Run a function in a process of its own; return its process id.

        What it says is added to a file, or a pipe that someone reads; else lost, but for errors.
        """
        return self._ask(
            {"function": function, "arguments": arguments, "output": output and str(output)}
        )

    def exit_code(self, pid: int) -> int | None:
        """Return how a process ended, as subprocess does; None: it runs."""
        return self._ask({"poll": pid})

    def wait(self, pid: int) -> int:
        """Return how a process ended, once it has."""
        return self._ask({"wait": pid})

    def kill(self, pid: int) -> None:
        """End a process with kill -9; return when it is gone."""
        self._ask({"kill": pid})

    def end_all(self) -> None:
        """End all processes with kill -9; others can be started then."""
        self._ask({"end": None})

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a nursery speaks over pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def lent_nursery(module: str) -> Generator[Nursery]:
    """Lend the one that this process has for a module; what was started ends with the block."""
    nursery = _nursery(module)
    try:
        yield nursery
    finally:
        nursery.end_all()


@cache
def _nursery(module: str) -> Nursery:
    nursery = Nursery(module)
    atexit.register(nursery.close)
    return nursery


def _serve(module: str, requests: TextIO, answers: TextIO) -> None:
    functions = import_module(module)
    codes: dict[int, int | None] = {}
    for line in requests:
        request = json.loads(line)
        if "function" in request:
            function = getattr(functions, request["function"])
            answer: int | None = _born(function, request["arguments"], request["output"])
            codes[answer] = None
        elif "end" in request:
            answer = _all_ended(codes)
        elif "kill" in request:
            answer = codes[request["kill"]] = _ended(request["kill"], codes)
        elif "wait" in request:
            answer = codes[request["wait"]] = _polled(request["wait"], codes, 0)
        else:
            answer = codes[request["poll"]] = _polled(request["poll"], codes, os.WNOHANG)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    _all_ended(codes)


def _born(function: Any, arguments: list[str], output: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    # The function may put another in its place.
    leave, code = os._exit, 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        if output is not None:
            os.dup2(1, 2)
            # Those of the nursery may be of files, in which one can seek, and keep what is printed.
            sys.stdout, sys.stderr = (os.fdopen(name, "w", 1, closefd=False) for name in (1, 2))
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the last words of a process
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def _ended(pid: int, codes: dict[int, int | None]) -> int | None:
    if codes[pid] is None:
        os.kill(pid, signal.SIGKILL)
    return _polled(pid, codes, 0)


def _all_ended(codes: dict[int, int | None]) -> None:
    for pid in codes:
        _ended(pid, codes)
    codes.clear()


def _polled(pid: int, codes: dict[int, int | None], options: int) -> int | None:
    if codes[pid] is not None:
        return codes[pid]
    found, status = os.waitpid(pid, options)
    return os.waitstatus_to_exitcode(status) if found else None


if __name__ == "__main__":
    _serve(sys.argv[1], sys.stdin, sys.stdout)
