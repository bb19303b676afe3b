"""Traces: one per group, from the choice of its prompt to the step that used it."""

import os
import re
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from astraflow import __version__
from astraflow.config.extras import install
from astraflow.core.errors import AstraflowError, Reason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

Value = str | int | float | bool


class _Place:
    """Holds the recorder of this process."""

    recorder: "OtelRecorder | None" = None
    share: float = 1.0


_CURRENT: ContextVar[str] = ContextVar("traceparent", default="")

_SHARES: Final = 1 << 32
# https://www.w3.org/TR/trace-context/#traceparent-header
_CONTEXT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def use_recorder(recorder: "OtelRecorder | None", *, share: float = 1.0) -> None:
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
        parent: Context of the span above; with `context` alone the span begins its trace. Below
            what is no context, which may come from anybody's node, nothing is recorded.
        context: Its own; empty: one of its own making. With neither nothing is recorded.
        end_ns: Unix time; None: now.
        error: Why it failed; empty: it did not.
        attributes: By name; `__` stands for a dot.
    """
    is_below = not parent or _CONTEXT.fullmatch(parent)
    if _Place.recorder is not None and is_below and (parent or context):
        _Place.recorder.record(
            name,
            context=context or context_below(parent, f"{name}/{time.perf_counter_ns()}"),
            parent=parent,
            start_ns=start_ns,
            end_ns=time.time_ns() if end_ns is None else end_ns,
            error=error,
            attributes={key.replace("__", "."): value for key, value in attributes.items()},
        )


def span(
    name: str, *, parent: str | None = None, **attributes: Value
) -> AbstractContextManager[str]:
    """Record what happens in the block, below the span around it.

    Args:
        name: What is done.
        parent: Context of the span above; None: of the block around this one. Empty: none, and
            nothing is recorded.
        attributes: By name; `__` stands for a dot.

    Returns:
        A block that is given the span's context; empty when it is not recorded.
    """
    above = _CURRENT.get() if parent is None else parent
    is_recorded = _Place.recorder is not None and above
    return _recorded(name, above, attributes) if is_recorded else nullcontext(above)


@contextmanager
def _recorded(name: str, above: str, attributes: dict[str, Value]) -> Generator[str]:
    context = context_below(above, f"{name}/{time.perf_counter_ns()}")
    started, token, error = time.time_ns(), _CURRENT.set(context), ""
    try:
        yield context
    except BaseException as raised:
        error = repr(raised)
        raise
    finally:
        _CURRENT.reset(token)
        record(
            name,
            start_ns=started,
            parent=above,
            context=context,
            end_ns=time.time_ns(),
            error=error,
            **attributes,
        )


OFF = "off"


def configure_tracing(
    role: str, *, exporter: str, folder: Path | None = None, share: float = 1.0
) -> None:
    """Record the spans of this process from now on.

    Args:
        role: Who speaks, such as `hub` or `raas-1`.
        exporter: off, file, console, or the name of an installed exporter, such as otlp.
        folder: Of the exporter `file`: gets ROLE-PID.jsonl; None: `traces`.
        share: Of the groups, which are traced.

    Raises:
        AstraflowError: INVALID_FIELD when OpenTelemetry or the exporter is not installed.
    """
    if exporter == OFF:
        use_recorder(None)
        return
    try:
        recorder = _recorder(role, exporter, folder or Path("traces"))
    except ImportError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"tracing.exporter {exporter}: OpenTelemetry is missing ({error}): "
            f"{install('otel')}, or set it to off",
        ) from error
    use_recorder(recorder, share=share)


class OtelRecorder:
    """Hands finished spans to an exporter."""

    def __init__(
        self,
        exporter: "SpanExporter",
        *,
        role: str,
        at_once: bool = False,
        file: TextIO | None = None,
    ) -> None:
        """Begin.

        Args:
            exporter: Gets the spans, in batches, from a thread of the SDK.
            role: Named as `service.name`.
            at_once: Export every span as it ends, for tests.
            file: That the exporter writes to, closed at the end; None: there is none.
        """
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import (  # noqa: PLC0415
            BatchSpanProcessor,
            SimpleSpanProcessor,
        )

        self._file = file
        self._ids = _make_ids()
        self._provider = TracerProvider(
            id_generator=self._ids,
            shutdown_on_exit=True,
            resource=Resource.create(
                {"service.name": f"astraflow-{role}", "rl.system": "astraflow"}
            ),
        )
        wrap = SimpleSpanProcessor if at_once else BatchSpanProcessor
        self._provider.add_span_processor(wrap(exporter))
        self._tracer = self._provider.get_tracer("astraflow", __version__)

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
        """Hand over a finished span; `parent` is empty for the first one of a trace."""
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.trace import (  # noqa: PLC0415
            NonRecordingSpan,
            SpanContext,
            StatusCode,
            TraceFlags,
            set_span_in_context,
        )

        above = Context()
        if parent:
            trace_id, span_id = int(parent[3:35], 16), int(parent[36:52], 16)
            flags = TraceFlags(TraceFlags.SAMPLED)
            known = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
            above = set_span_in_context(NonRecordingSpan(known), above)
        self._ids.force(int(context[3:35], 16), int(context[36:52], 16))
        made = self._tracer.start_span(
            name, context=above, start_time=start_ns, attributes=attributes
        )
        if error:
            made.set_status(StatusCode.ERROR, error)
        made.end(end_time=end_ns)

    def close(self) -> None:
        self._provider.shutdown()
        if self._file is not None:
            self._file.close()


def _make_ids():  # noqa: ANN202 - a class of the extra's
    from opentelemetry.sdk.trace.id_generator import IdGenerator  # noqa: PLC0415

    class Ids(IdGenerator):
        """Gives the ids that were set last on this thread."""

        def __init__(self) -> None:
            self._forced = threading.local()

        def force(self, trace_id: int, span_id: int) -> None:
            self._forced.trace_id, self._forced.span_id = trace_id, span_id

        def generate_trace_id(self) -> int:
            return self._forced.trace_id

        def generate_span_id(self) -> int:
            return self._forced.span_id

    return Ids()


def _recorder(role: str, name: str, folder: Path) -> OtelRecorder:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

    match name:
        case "console":
            return OtelRecorder(ConsoleSpanExporter(formatter=_line), role=role)
        case "file":
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / f"{role}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
            return OtelRecorder(
                ConsoleSpanExporter(out=file, formatter=_line), role=role, file=file
            )
        case _:
            return OtelRecorder(_installed(name), role=role)


def _line(finished: "ReadableSpan") -> str:
    return finished.to_json(indent=None) + "\n"


def _installed(name: str) -> "SpanExporter":
    group = "opentelemetry_traces_exporter"
    for point in entry_points(group=group, name=name):
        return point.load()()
    known = ", ".join(sorted(point.name for point in entry_points(group=group))) or "none"
    raise AstraflowError(
        Reason.INVALID_FIELD,
        f"tracing.exporter {name}: no such exporter is installed; there are {known}, and off, "
        "file, console",
    )
