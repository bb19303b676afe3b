"""The hub of a recipe, and what its processes tell about themselves."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from astraflow.config.strict import Strict


class Tls(Strict):
    """PEM files; all unset: plain text, which suits loopback only."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None


class Journal(Strict):
    """What of the run outlives the hub's process."""

    kind: Literal["sqlite", "none"] = "sqlite"
    """sqlite: a hub that died goes on where it was. none: its run dies with it."""
    durability: Literal["process", "power"] = "process"
    """What an acknowledgement survives: the death of the hub, or of the machine's power too."""
    compact_nbytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of records after which a snapshot takes their place."""


class Metrics(Strict):
    """What every process tells Prometheus; see observability.md."""

    listen: str = "127.0.0.1:0"
    """host:port of the hub's endpoint, or off; `astraflow run` gives its other processes the ports
    after it. Port 0 takes a free one: the log and `astraflow status` say which."""

    @field_validator("listen")
    @classmethod
    def _is_place(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if listen != "off" and not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"'{listen}' is neither host:port nor off")
        return listen


class Tracing(Strict):
    """A trace per group, over all processes; see observability.md."""

    exporter: str = "off"
    """off; file or console: JSON lines; or the name of an installed OpenTelemetry exporter, such as
    otlp, which reads its own OTEL_ variables. Needs `astraflow[otel]`."""
    path: Path | None = None
    """Folder of the exporter `file`; unset: traces, in the run's folder."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Of the groups, which are traced."""


class Hub(Strict):
    """The Dataflow process."""

    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, or a host or IP; unset: as listened on."""
    session_ttl_s: float = Field(default=10.0, ge=0.5)
    """A member that says nothing for so long is gone, and what it held is issued again."""
    patience_s: float = Field(default=30.0, gt=0)
    """A member that hears nothing from the hub for so long gives up. A hub that comes and goes is
    borne while it answers anything in between."""
    tls: Tls = Tls()
    journal: Journal = Journal()
