"""A hub in a process of its own, on the first core, and what it takes of the machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from astraflow.config.run_dir import RunDir, read_json_lines

MODES: Final[dict[str, dict[str, Any]]] = {
    "none": {"kind": "none"},
    "process": {"kind": "sqlite", "durability": "process"},
    "power": {"kind": "sqlite", "durability": "power"},
}
POLICY: Final = "solver"
GROUP_SIZE: Final = 8
GROUPS_PER_BATCH: Final = 32
TOKEN: Final = "benchmark"
CALLBACKS: Final = "callbacks.jsonl"
_WATCHED: Final = str(Path(__file__).with_name("watched.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubProcess:
    """A hub that serves."""

    process: psutil.Process
    run_dir: RunDir

    @property
    def address(self) -> str:
        """Where it answers."""
        return self.run_dir.read_endpoint().address

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    @property
    def snapshot_cpu_s(self) -> float:
        """Seconds of CPU of the forks that have written snapshots so far."""
        times = self.process.cpu_times()
        return times.children_user + times.children_system

    @property
    def written_nbytes(self) -> int:
        """Bytes sent to disks so far."""
        return self.process.io_counters().write_bytes

    @property
    def rss_nbytes(self) -> int:
        """Bytes in memory now."""
        return self.process.memory_info().rss

    @property
    def rss_peak_nbytes(self) -> int:
        """Bytes in memory, at most so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(peak) * 1024

    @property
    def core_wait_s(self) -> float:
        """Seconds in which a thread of it could run and had no core."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[1]) for each in tasks) / 1e9

    @property
    def long_callbacks(self) -> list[dict[str, Any]]:
        """Callbacks of its event loop that took 5 ms of CPU and more; for a hub that is watched."""
        return list(read_json_lines(self.run_dir.root.with_name(CALLBACKS)))

    @property
    def journal_nbytes(self) -> int:
        """Bytes of the journal and its snapshot now."""
        nbytes = 0
        for path in self.run_dir.journal.parent.iterdir():
            with suppress(FileNotFoundError):
                nbytes += path.stat().st_size
        return nbytes


@contextmanager
def running_hub(
    folder: Path,
    mode: str,
    *,
    max_staleness: int,
    is_watched: bool = False,
    payloads: Path | None = None,
    **journal: Any,
) -> Generator[HubProcess]:
    """Run a hub whose journal is of some mode until the block ends.

    Args:
        folder: For its run, its recipe and its log.
        mode: Of `MODES`.
        max_staleness: Of the recipe.
        is_watched: Whether each callback of its event loop is looked at, which costs a little.
        payloads: Folder of the payload store; None: there is none.
        journal: What else the recipe says of the journal.
    """
    run_dir = RunDir(folder / "run")
    recipe = _recipe(folder, MODES[mode] | journal, max_staleness, payloads)
    command = ["dataflow", "serve", str(recipe), "--run-dir", str(run_dir.root)]
    tokens = {"ASTRAFLOW_JOIN_TOKEN": TOKEN, "ASTRAFLOW_OPERATOR_TOKEN": TOKEN}
    program = [_WATCHED, str(folder / CALLBACKS)] if is_watched else ["-m", "astraflow"]
    with (folder / "hub.log").open("wb") as log:
        hub = subprocess.Popen(
            [sys.executable, *program, *command],
            env={**os.environ, **tokens},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    psutil.Process(hub.pid).cpu_affinity([0])
    try:
        while not run_dir.endpoint.exists():
            if hub.poll() is not None:
                sys.exit((folder / "hub.log").read_text())
            time.sleep(0.05)
        yield HubProcess(process=psutil.Process(hub.pid), run_dir=run_dir)
    finally:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            hub.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                hub.wait(3)


def _recipe(
    folder: Path, journal: dict[str, Any], max_staleness: int, payloads: Path | None
) -> Path:
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(1000)))
    trainer = {"groups_per_batch": GROUPS_PER_BATCH, "max_staleness": max_staleness}
    recipe: dict[str, Any] = {
        "name": "hub",
        "policies": {POLICY: {"model": {"path": "unused"}, "trainer": trainer}},
        "data": {"train": {"path": str(data)}},
        "workflows": {"main": {"name": "single_turn"}},
        "rollouts": {"data_set": "train", "workflow": "main", "group_size": GROUP_SIZE},
        "hub": {"session_ttl_s": 60, "journal": journal},
    }
    if payloads is not None:
        recipe["rollouts"]["payloads"] = {"url": f"file://{payloads}"}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
