"""The account: what the hub knew at the end, as `status.json`."""

import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astraflow.core.status import FailureReport
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.loop_probe import LoopProbe


class Account:
    """Adds up what a hub did since this was made."""

    def __init__(self, hub: Hub, probe: LoopProbe) -> None:
        self._hub = hub
        self._probe = probe
        self._start = (time.monotonic(), time.process_time())

    def to_json(self) -> dict[str, Any]:
        """Return the run, its books, its members and how the hub fared."""
        memory, run = self._hub.memory, self._hub.run
        status = self._hub.status()
        first, last = memory.first_task_time, memory.last_version_time
        trained = first is not None and last is not None and last > first
        return {
            "run_id": status.run_id,
            "state": status.state,
            "failure": None if status.failure is None else asdict(status.failure),
            "failures": _failures_row(status.failures),
            "start_time": status.start_time.isoformat(),
            "end_time": status.server_time.isoformat(),
            "train_s": (last - first).total_seconds() if trained and last and first else 0.0,
            "epochs": dict(status.epochs),
            "dead_letter_count": status.dead_letter_count,
            "policies": [asdict(policy) for policy in status.policies],
            "books": [asdict(book) | {"balanced": book.is_balanced} for book in run.accounts()],
            "members": memory.roster.rows(status.members),
            "hub": self._hub_row(),
        }

    def _hub_row(self) -> dict[str, Any]:
        wall_s = max(1e-9, time.monotonic() - self._start[0])
        cpu_s = time.process_time() - self._start[1]
        return {
            "event_count": self._hub.event_count,
            "max_event_s": self._hub.max_apply_s,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "idle_fraction": max(0.0, 1.0 - cpu_s / wall_s),
            "max_rss_nbytes": _peak_rss_nbytes(),
            "loop": asdict(self._probe.stats),
        }


def _failures_row(report: FailureReport) -> dict[str, Any]:
    causes = [
        {
            "cause": each.cause,
            "count": each.count,
            "reason": each.last.reason,
            "message": each.last.message,
            "traceback": each.last.traceback,
            "first_time": each.first_time.isoformat(),
            "last_time": each.last_time.isoformat(),
        }
        for each in report.causes
    ]
    return {
        "finished_count": report.finished_count,
        "failed_count": report.failed_count,
        "failed_share": round(report.failed_share, 4),
        "causes": causes,
    }


def _peak_rss_nbytes() -> int:
    """Return the most memory that this process had resident.

    Where there is /proc, from VmHWM: what getrusage(2) tells begins on Linux with what the
    parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
