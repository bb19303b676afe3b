"""Spans by the SDK of OpenTelemetry, `astraflow[otel]`."""

import os
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from astraflow import __version__
from astraflow.core.errors import AstraflowError, Reason
from astraflow.telemetry.traces import Value, use_recorder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

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
            f"tracing.exporter {exporter}: OpenTelemetry is missing ({error}); install "
            "astraflow[otel], or set it to off",
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
        """Hand over a finished span; see `traces.Recorder`."""
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
        """Export what is left."""
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
            file = _open(folder, role)
            return OtelRecorder(
                ConsoleSpanExporter(out=file, formatter=_line), role=role, file=file
            )
        case _:
            return OtelRecorder(_installed(name), role=role)


def _open(folder: Path, role: str) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{role}-{os.getpid()}.jsonl").open("a", encoding="utf-8")


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
