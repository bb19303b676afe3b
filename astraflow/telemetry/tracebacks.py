"""Tracebacks for whoever wrote a workflow: down to a line of theirs, and bounded.

Frames of this package, of the standard library and of installed packages lie around the code of a
user like a frame around a picture: what is told begins with the first frame of the user's own and
ends in the last one, with the source of each.
"""

import asyncio
import functools
import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

from astraflow.core.errors import AstraflowError

MAX_NBYTES = 4096
"""Of a traceback, in UTF-8."""
_MAX_MESSAGE = 600
_MAX_FRAMES = 10
_OWN = str(Path(__file__).resolve().parents[1])
_STDLIB = str(Path(sysconfig.get_path("stdlib")).resolve())
_SCRIPTS = str(Path(sysconfig.get_path("scripts")).resolve())
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_USER, _PACKAGE, _OURS, _OTHER = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """Where something went wrong.

    Attributes:
        cause: Equal for equal failures, such as "KeyError at my_workflows.py:22".
        traceback: The frames down to that line, with their source, and what was raised.
        is_users: Whether any frame is of the user's own code.
    """

    cause: str
    traceback: str
    is_users: bool


def place_of(error: BaseException, *, _after: Sequence[BaseException] = ()) -> CodePlace:
    """Return where an exception was raised.

    An AstraflowError that was made of another exception is told as that one where it passed through
    code of the user's own; a time-out as where it interrupted such code; one that says itself where
    it belongs, as that.
    """
    if isinstance(error, AstraflowError) and error.cause:
        return CodePlace(cause=error.cause, traceback=error.traceback, is_users=True)
    seen, cause = (*_after, error), error.__cause__
    # What is raised from itself is its own cause: `raise error from error`.
    is_made = isinstance(error, AstraflowError | TimeoutError)
    if is_made and cause is not None and all(cause is not each for each in seen):
        inner = place_of(cause, _after=seen)
        if inner.is_users:
            return inner
    frames = traceback.extract_tb(error.__traceback__)
    is_late = any(isinstance(each, TimeoutError) for each in _after)
    if is_late and isinstance(error, asyncio.CancelledError):
        return _place(frames, "Timeout", "it waited here when its time was over")
    name = error.reason if isinstance(error, AstraflowError) else type(error).__name__
    said = bounded("".join(traceback.format_exception_only(error)).rstrip(), _MAX_MESSAGE)
    if cause is not None and cause is not error:
        said += bounded(f"\n(from {type(cause).__name__}: {cause})", 200)
    return _place(frames, name, said)


def place_of_stack(frame: FrameType, *, name: str, said: str) -> CodePlace:
    """Return where a thread is that goes on.

    Args:
        frame: Its innermost.
        name: For the cause, such as Blocked.
        said: The last line.
    """
    return _place(traceback.extract_stack(frame), name, said)


def place_of_definition(thing: Any, *, name: str, said: str) -> CodePlace:
    """Return where a function, or the method that an object is called by, is defined.

    Args:
        thing: A function, a bound method, or an object with `__call__`.
        name: For the cause, such as TypeError.
        said: The last line.
    """
    code = _code_of(thing)
    if code is None:
        return CodePlace(cause=f"{name} in {type(thing).__name__}", traceback=said, is_users=False)
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return _place([frame], name, said)


def is_users(filename: str) -> bool:
    """Whether a file is of the user's own code."""
    return _kind(filename) == _USER


def bounded(text: str, most: int = _MAX_MESSAGE) -> str:
    """Return a text, cut in its middle where it has more than so many characters."""
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3]} … {text[-(most // 3) :]}"


def _code_of(thing: Any) -> CodeType | None:
    while isinstance(thing, functools.partial):
        thing = thing.func
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        made = cast("type[Any]", type(thing))
        thing = getattr(made, "__call__", None)  # noqa: B004 - its code, not whether it has one
    return getattr(inspect.unwrap(thing), "__code__", None) if thing is not None else None


def _place(frames: Sequence[traceback.FrameSummary], name: str, said: str) -> CodePlace:
    kinds = [_kind(frame.filename) for frame in frames]
    if not frames:
        return CodePlace(cause=name, traceback=said, is_users=False)
    kind = min(kinds)
    first = kinds.index(kind)
    last = len(kinds) - 1 - kinds[::-1].index(kind)
    shown = frames[max(first, last + 1 - _MAX_FRAMES) : last + 1]
    lines = ["Traceback (most recent call last):", *map(_line, shown)]
    if last + 1 < len(frames):
        deepest, count = frames[-1], len(frames) - 1 - last
        lines.append(
            f"  (and {count} call{'s' if count > 1 else ''} deeper, in {deepest.name}, "
            f"{deepest.filename}:{deepest.lineno})"
        )
    line = frames[last]
    return CodePlace(
        cause=f"{name} at {Path(line.filename).name}:{line.lineno}",
        traceback=_cut("\n".join(lines), said),
        is_users=kind == _USER,
    )


def _line(frame: traceback.FrameSummary) -> str:
    head = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    source = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{head}\n    {bounded(source, 200)}" if source else head


def _cut(frames: str, said: str) -> str:
    """Return both, at most MAX_NBYTES long; the last lines of the frames matter most."""
    end = f"\n{said}".encode()[-MAX_NBYTES:]
    room = MAX_NBYTES - len(end)
    return ((frames.encode()[-room:] if room else b"") + end).decode(errors="replace")


@functools.lru_cache(maxsize=4096)
def _kind(filename: str) -> int:
    path = Path(filename)
    if filename.startswith("<") or not path.is_file():
        return _OTHER
    resolved = path.resolve()
    if resolved.is_relative_to(_OWN):
        return _OURS
    if not _INSTALLED.isdisjoint(resolved.parts):
        return _PACKAGE
    is_other = resolved.is_relative_to(_STDLIB) or resolved.is_relative_to(_SCRIPTS)
    return _OTHER if is_other else _USER
