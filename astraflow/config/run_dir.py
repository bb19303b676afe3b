"""The folder of a run: what lies where, and how a run on this machine is found again."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from astraflow.core.errors import AstraflowError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEndpoint:
    """How to reach the hub of a run from this machine.

    Attributes:
        address: host:port as others dial it.
        pid: Of the hub's process.
        start_time_s: When that process began, since the epoch; 0: it does not say.
        operator_token: For ControlService; secret.
        join_token: For members; secret.
        metrics_address: host:port of its metrics; empty: nowhere.
        tls: PEM files to dial it with: `ca`, and `certificate` and `key` where it wants to see
            them; empty: plain text.
    """

    address: str
    pid: int
    operator_token: str
    join_token: str
    metrics_address: str = ""
    start_time_s: float = 0.0
    tls: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names of the files of one run, below `root`."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it was resolved."""
        return self.root / "recipe.yaml"

    @property
    def lock(self) -> Path:
        """Held by the command that runs it."""
        return self.root / "lock"

    @property
    def endpoint(self) -> Path:
        """HubEndpoint as JSON, for this user's eyes only."""
        return self.root / "hub.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def batches(self) -> Path:
        """One JSON line per optimizer step: where each of its rows came from."""
        return self.root / "batches.jsonl"

    @property
    def versions(self) -> Path:
        """One JSON line per version that went live, or failed to, on a RaaS."""
        return self.root / "versions.jsonl"

    @property
    def evals(self) -> Path:
        """One JSON line per finished evaluation."""
        return self.root / "evals.jsonl"

    @property
    def status(self) -> Path:
        """What the hub knew at the end."""
        return self.root / "status.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def journal(self) -> Path:
        """The hub's journal: every event, or those since the snapshot."""
        return self.root / "journal" / "journal.sqlite"

    @property
    def snapshot(self) -> Path:
        """State of the run before the journal's first event."""
        return self.root / "journal" / "snapshot"

    @property
    def plot(self) -> Path:
        """The reward over the steps."""
        return self.root / "reward.png"

    @property
    def rollouts(self) -> Path:
        """Folder of sampled rollouts, one JSON line each."""
        return self.root / "rollouts"

    def log(self, process: str) -> Path:
        """Return where a process writes its log."""
        return self.root / "logs" / f"{process}.log"

    def saved(self, checkpoint_id: str) -> Path:
        """Return where a checkpoint of the whole run says what it is made of."""
        return self.root / "checkpoints" / f"{checkpoint_id}.json"

    def checkpoints(self, policy_id: str) -> Path:
        """Return the folder of a policy's checkpoints."""
        return self.root / "checkpoints" / policy_id

    def checkpoint(self, policy_id: str, step: int) -> Path:
        """Return the Hugging Face directory of the weights after so many steps."""
        return self.checkpoints(policy_id) / f"step_{step:06d}"

    def write_endpoint(self, endpoint: HubEndpoint) -> None:
        """Let commands on this machine find the hub; the file is readable by its owner only.

        It is replaced whole: a hub that returns takes its port and tokens from here.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be written.
        """
        fields = {name: getattr(endpoint, name) for name in HubEndpoint.__slots__}
        draft = self.endpoint.with_name(self.endpoint.name + ".draft")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # One of an earlier release may be open to others.
            self.root.chmod(0o700)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(fields, file)
            draft.replace(self.endpoint)
        except OSError as error:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"{self.endpoint} cannot be written ({error}); make room or make it writable, and "
                "start the hub again with the same run folder",
            ) from error

    def read_endpoint(self) -> HubEndpoint:
        """Return how to reach the hub.

        Raises:
            AstraflowError: NOT_READY when no hub of this run is known here.
        """
        try:
            fields = json.loads(self.endpoint.read_text())
        except (OSError, ValueError) as error:
            raise AstraflowError(
                Reason.NOT_READY,
                f"{self.root} has no running hub: {self.endpoint.name} is missing. A run that is"
                " over has none; `astraflow run --resume` goes on with one that died",
            ) from error
        return HubEndpoint(**fields)


def keep_files_private() -> None:
    """Have all that this process and those that it starts write be its user's alone.

    Files are 0600 and folders 0700 from now on: journals, weights, tokens, sockets, logs.
    """
    os.umask(0o077)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; none of a missing one, and not a torn last line."""
    if not path.exists():
        return []
    # Of bytes, as texts in them may have line ends of Unicode.
    lines = path.read_bytes().splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return rows


_READ_NBYTES: Final = 1 << 24


class GrowingLines:
    """JSON lines that may grow meanwhile: each is yielded once, and found again by its offset."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    @property
    def left_nbytes(self) -> int:
        """What has not been yielded yet, a torn last line included."""
        return self.path.stat().st_size - self.offset if self.path.exists() else 0

    @property
    def has_shrunk(self) -> bool:
        """Whether its path is of another file by now, or of none: lines are only appended."""
        return self.offset > (self.path.stat().st_size if self.path.exists() else 0)

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines that came since the last call, each with its offset."""
        if self.left_nbytes <= 0:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while lines := file.readlines(_READ_NBYTES):
                for line in lines:
                    # What is not a whole line yet comes with the next call.
                    if not line.endswith(b"\n"):
                        return
                    yield self.offset, line
                    self.offset += len(line)

    def at(self, offset: int) -> dict[str, Any]:
        """Return the object of the line that begins there."""
        from pydantic_core import from_json  # noqa: PLC0415 - 15 ms that few commands need

        with self.path.open("rb") as file:
            file.seek(offset)
            return from_json(file.readline())
