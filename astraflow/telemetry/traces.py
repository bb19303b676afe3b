"""Traces: one trace per group, from the choice of its prompt to the step that used it.

Off by default, and then a span costs one look at a global. Contexts travel as W3C `traceparent`
strings. A group's own is derived from its id, so a hub that was started anew goes on with the
same trace; a group that is not sampled has none, and nobody records anything for it.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Final, Protocol

Value = str | int | float | bool


class Recorder(Protocol):
    """Where finished spans go; `astraflow.telemetry.otel` makes one."""

    def record(
        self,
        name: str,
        *,
        context: str,
        parent: str,
        start_ns: int,
        end_ns: int,
        error: str,
        attributes: dict[str, Value],
    ) -> None:
        """Take a finished span; `parent` is empty for the first one of a trace."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class _Place:
    """Holds the recorder of this process."""

    recorder: Recorder | None = None
    share: float = 1.0


_CURRENT: ContextVar[str] = ContextVar("traceparent", default="")
_SHARES: Final = 1 << 32


def use_recorder(recorder: Recorder | None, *, share: float = 1.0) -> None:
    """Record spans from now on; None: no longer.

    Args:
        recorder: Of this process; the one before is closed.
        share: Of the groups, which are traced.
    """
    before, _Place.recorder = _Place.recorder, recorder
    _Place.share = share
    if before is not None:
        before.close()


def is_tracing() -> bool:
    """Whether spans are recorded in this process."""
    return _Place.recorder is not None


def group_context(run_id: str, group_id: str) -> str:
    """Return the context of a group's first span; empty: it is not traced.

    Example:
        >>> group_context("run", "g1")
        ''
    """
    if _Place.recorder is None:
        return ""
    digest = blake2b(f"{run_id}/{group_id}".encode(), digest_size=28).digest()
    if int.from_bytes(digest[24:]) >= _Place.share * _SHARES:
        return ""
    return f"00-{digest[:16].hex()}-{digest[16:24].hex()}-01"


def context_below(parent: str, key: str) -> str:
    """Return the context of a span below another, the same for the same key."""
    if not parent:
        return ""
    return f"{parent[:36]}{blake2b(f'{parent}/{key}'.encode(), digest_size=8).hexdigest()}-01"


def record(
    name: str,
    *,
    start_ns: int,
    parent: str = "",
    context: str = "",
    end_ns: int | None = None,
    error: str = "",
    **attributes: Value,
) -> None:
    """Record a span whose start is known.

    Args:
        name: What was done.
        start_ns: Unix time.
        parent: Context of the span above; with `context` alone the span begins its trace.
        context: Its own; empty: one of its own making. With neither nothing is recorded.
        end_ns: Unix time; None: now.
        error: Why it failed; empty: it did not.
        attributes: By name; `__` stands for a dot.
    """
    if _Place.recorder is not None and (parent or context):
        own = context or context_below(parent, f"{name}/{time.perf_counter_ns()}")
        end_ns = time.time_ns() if end_ns is None else end_ns
        _hand_over(
            name, own, parent, times_ns=(start_ns, end_ns), error=error, attributes=attributes
        )


def _hand_over(
    name: str,
    context: str,
    parent: str,
    *,
    times_ns: tuple[int, int],
    error: str,
    attributes: dict[str, Value],
) -> None:
    if _Place.recorder is None:
        return
    _Place.recorder.record(
        name,
        context=context,
        parent=parent,
        start_ns=times_ns[0],
        end_ns=times_ns[1],
        error=error,
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


@contextmanager
def span(name: str, *, parent: str | None = None, **attributes: Value) -> Generator[str]:
    """Record what happens in the block, below the span around it.

    Args:
        name: What is done.
        parent: Context of the span above; None: of the block around this one. Empty: none, and
            nothing is recorded.
        attributes: By name; `__` stands for a dot.

    Yields:
        The span's context; empty when it is not recorded.
    """
    above = _CURRENT.get() if parent is None else parent
    if _Place.recorder is None or not above:
        yield above
        return
    context = context_below(above, f"{name}/{time.perf_counter_ns()}")
    started, token, error = time.time_ns(), _CURRENT.set(context), ""
    try:
        yield context
    except BaseException as raised:
        error = repr(raised)
        raise
    finally:
        _CURRENT.reset(token)
        times_ns = started, time.time_ns()
        _hand_over(name, context, above, times_ns=times_ns, error=error, attributes=attributes)
