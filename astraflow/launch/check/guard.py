"""Code of a user, run in a check: it starts and ends no process, and it ends in time."""

import asyncio
import contextvars
import ctypes
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from traceback import FrameSummary, extract_stack, extract_tb
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

from astraflow.telemetry.tracebacks import is_users

T = TypeVar("T")

_STARTS = frozenset(
    (
        *("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
        *("os.system", "os.exec", "pty.spawn"),
    )
)
_IS_GUARDED = contextvars.ContextVar("astraflow_check_starts_no_process", default=False)
_SHOWN_FRAMES = 3


class ProcessRefusedError(OSError):
    """A process was to be started in a check; those who cope without one see an OSError."""


class _LeftBehind(SystemExit):
    """Interrupts what hangs."""


class OvertimeError(Exception):
    """Code took longer than it may.

    Attributes:
        lines: Where it was, in files of the user; empty: nowhere in those.
        limit_s: Seconds that it had; 0: none were left.
    """

    def __init__(self, lines: str, limit_s: float) -> None:
        super().__init__("took too long")
        self.lines = lines
        self.limit_s = limit_s


@contextmanager
def no_processes() -> Generator[None]:
    """Refuse to start processes and to end this one; keep standard output for the command's own."""
    _install()
    token = _IS_GUARDED.set(True)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _IS_GUARDED.reset(token)


@cache
def _install() -> None:
    """Add the audit hook; Python has no way to take one out, so it looks whom it is for.

    No such hook hears of `os._exit`, at which a check would end without a word.
    """
    leave = os._exit

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS and _IS_GUARDED.get():
            raise ProcessRefusedError(f"a check starts no process ({event} {arguments[:1]})")

    def stay(status: int) -> NoReturn:
        if _IS_GUARDED.get():
            raise SystemExit(status)
        leave(status)

    sys.addaudithook(refuse)
    os._exit = stay


@contextmanager
def reporting_delays(after_s: float = 10.0) -> Generator[None]:
    """Say where code of a user is that this thread runs for long, as an import that never ends."""
    caller, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        told = ""
        while not over.wait(after_s):
            lines = _lines_of(caller)
            if lines and lines != told:
                print(f"code of yours takes long, and is waited for:\n{lines}", file=sys.stderr)  # noqa: T201 - whoever waits reads it
                told = lines

    watching = threading.Thread(target=watch, name="check-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


class UserLoop:
    """An event loop in a thread of its own, on which code of a user runs for a limited time.

    All of it runs on one loop, as on a node, so what it keeps of its loop stays good. A loop on
    which something hangs is left behind.

    Example: with 1.5 s, what hangs gets 1.5 s, the next that hangs 0.5 s, and the third nothing.
    """

    def __init__(self, limit_s: float) -> None:
        """Start no thread before it is needed.

        Args:
            limit_s: Seconds for one call; all together get a third more.
        """
        self.limit_s = limit_s
        self._left_s = limit_s * 4 / 3
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine to its end.

        Raises:
            OvertimeError: It has not ended; where it computes without a pause, it is interrupted.
        """
        limit_s = min(self.limit_s, self._left_s)
        if limit_s <= 0:
            raise OvertimeError("", 0.0)

        async def limited() -> T:
            deadline = asyncio.timeout(limit_s)
            try:
                async with deadline:
                    return await make()
            except TimeoutError as error:
                if deadline.expired():
                    raise OvertimeError(user_lines(error), limit_s) from error
                raise
            except SystemExit as ended:
                if isinstance(ended, _LeftBehind):
                    raise
                # It would end the loop, and nobody would be told.
                raise RuntimeError("it ended the process") from ended
            except asyncio.CancelledError as cancelled:
                # Who waits for the outcome of this would not be told where.
                raise RuntimeError("it was cancelled by itself") from cancelled

        started = time.monotonic()
        try:
            future = asyncio.run_coroutine_threadsafe(limited(), self._started())
            # More time than the loop has: one that can end by itself says where it was.
            done, _ = wait([future], limit_s * 1.25)
            if done:
                return future.result()
            raise OvertimeError(self._leave(), limit_s)
        finally:
            self._left_s -= time.monotonic() - started

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # What is interrupted was told already.
            self._loop.set_exception_handler(lambda _loop, _context: None)
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="check", daemon=True
            )
            self._thread.start()
        return self._loop

    def _leave(self) -> str:
        """Interrupt what hangs; return where it was. What waits in C is left behind."""
        thread, self._loop, self._thread = self._thread, None, None
        ident = 0 if thread is None else thread.ident or 0
        lines = _lines_of(ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(ident), ctypes.py_object(_LeftBehind)
        )
        return lines


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    # What hung and was interrupted ends so.
    with suppress(SystemExit):
        try:
            loop.run_forever()
        finally:
            loop.close()


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and what groups among them hold; the first first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", each).exceptions
        waiting += [each.__cause__, each.__context__]


def is_process_refused(error: BaseException) -> bool:
    """Whether an error came of a process that a check did not start."""
    return any(isinstance(each, ProcessRefusedError) for each in causes(error))


def user_lines(error: BaseException) -> str:
    """Return the lines of the user's files that an error came through, the last ones last."""
    found = ""
    for each in causes(error):
        if isinstance(each, SyntaxError) and each.filename:
            line = (each.text or linecache.getline(each.filename, each.lineno or 1)).strip()
            return f"{each.filename}, line {each.lineno}: {line}"
        found = _shown(extract_tb(each.__traceback__)) or found
    return found


def _lines_of(thread: int) -> str:
    """Return the lines of the user's files at which a thread is, the last ones last."""
    frames: dict[int, FrameType] = sys._current_frames()  # noqa: SLF001 - as faulthandler does  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(thread)
    return "" if frame is None else _shown(list(extract_stack(frame)))


def _shown(frames: list[FrameSummary]) -> str:
    own = [each for each in frames if is_users(each.filename)]
    return "\n".join(
        f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame in own[-_SHOWN_FRAMES:]
    )


def message_of(error: BaseException) -> str:
    """Return the type and message of what an error was raised from."""
    root, seen = error, [error]
    while (below := _below(root)) is not None and all(below is not each for each in seen):
        seen.append(below)
        root = below
    return f"{type(root).__name__}: {root}" if str(root) else type(root).__name__


def _below(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error.__cause__
