"""Logs: structlog, for people on a console or as JSON lines, own and foreign records alike."""

import logging
import os
import sys
from pathlib import Path
from typing import Any, Final

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from astraflow.core.errors import AstraflowError, Reason

LOG_FORMAT: Final = "ASTRAFLOW_LOG_FORMAT"
"""Environment variable: `json` for one JSON object per line; `text`, or unset: for people."""

_LEVELS: Final = logging.getLevelNamesMapping()

# They say at INFO what their callers log better.
_CHATTY: Final = ("asyncio", "grpc", "urllib3", "filelock", "matplotlib")


def configure_logging(
    role: str, *, log_file: Path | None = None, json: bool | None = None, level: str = "info"
) -> None:
    """Send all logs of this process to one place. A second call replaces the first.

    Args:
        role: Who speaks, such as `hub` or `raas-1`; on every record.
        log_file: Appended to; its folder is made. None: standard error.
        json: One JSON object per line, for machines; False: lines for people. None: as the
            environment says.
        level: debug, info, warning or error.

    Raises:
        AstraflowError: INVALID_FIELD for an environment that names no format.
        ValueError: For an unknown level.
    """
    asked = os.environ.get(LOG_FORMAT) or "text"
    if json is None and asked not in ("json", "text"):
        raise AstraflowError(Reason.INVALID_FIELD, f"{LOG_FORMAT} is '{asked}'; give json or text")
    is_json = asked == "json" if json is None else json
    number = _LEVELS.get(level.upper())
    if number is None:
        raise ValueError(f"log level '{level}' is none of debug, info, warning, error")
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file, encoding="utf-8")
    is_terminal = log_file is None and sys.stderr.isatty()
    handler.setFormatter(_formatter(role, json=is_json, colors=is_terminal))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(number)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(role),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # Loggers are made at import, before this runs; a cached one would keep the old ways.
        cache_logger_on_first_use=False,
    )


def _formatter(role: str, *, json: bool, colors: bool) -> logging.Formatter:
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if json:
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Richer tracebacks show local variables, and with them secrets.
        plain = structlog.dev.plain_traceback
        last += [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_shared(role), processors=last)


def _shared(role: str) -> list[Processor]:
    """Return what is done to own and foreign records alike."""

    def add_role(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        del logger, method
        event.setdefault("role", role)
        return event

    stamp: Any = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_role,
        stamp,
    ]
