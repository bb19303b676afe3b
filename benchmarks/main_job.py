"""Measure the main job as its user meets it: `astraflow run`, from outside.

For each seed: wall clock of the whole run, held-out accuracy of the saved checkpoints recomputed
by `astraflow eval`, peak resident memory of every process. With `--churn`, one rollout node
is killed with SIGKILL in mid-run and another one joins by hand; the time from its JoinPool to the
first live version, and whether the run's books add up, are told too.

    python benchmarks/main_job.py --recipe recipes/sort.yaml --seeds 0 1 2 --out main_job.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from astraflow.config.run_dir import RunDir, read_json_lines

POLL_S = 0.2
CHURN_STEP = 15


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        results = [_run(arguments, seed, Path(scratch)) for seed in arguments.seeds]
    means = {
        name: mean(result[name] for result in results)
        for name in ("accuracy_before", "accuracy_after", "wall_s")
    }
    report = {"recipe": arguments.recipe, "cores": os.cpu_count(), "mean": means, "runs": results}
    text = json.dumps(report, indent=2)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="recipes/sort.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", default=[], help="override of the recipe")
    parser.add_argument("--churn", action="store_true", help="kill a node, let another one join")
    parser.add_argument("--fresh-cache", action="store_true", help="make the warm-up model anew")
    parser.add_argument("--out")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, seed: int, scratch: Path) -> dict[str, Any]:
    environment = dict(os.environ)
    if arguments.fresh_cache:
        environment["XDG_CACHE_HOME"] = str(scratch / f"cache-{seed}")
    run_dir = RunDir(scratch / f"seed-{seed}")
    sets = [part for each in [*arguments.set, f"seed={seed}"] for part in ("--set", each)]
    started = time.monotonic()
    process = subprocess.Popen(
        _astraflow(
            *("run", arguments.recipe, "--runs", str(scratch), "--name", run_dir.root.name), *sets
        ),
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    memory = _Memory(process.pid)
    churn = _churn(process, run_dir, arguments.recipe) if arguments.churn else {}
    code = process.wait()
    wall_s = time.monotonic() - started
    memory.stop()
    return {
        "seed": seed,
        "exit_code": code,
        "wall_s": round(wall_s, 1),
        **_accuracies(run_dir),
        **_books(run_dir),
        "peak_rss_mib": memory.peaks(),
        **churn,
    }


def _astraflow(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "astraflow", *arguments]


def _accuracies(run_dir: RunDir) -> dict[str, Any]:
    done = subprocess.run(
        _astraflow("eval", str(run_dir.root), "--json"), capture_output=True, text=True, check=True
    )
    first, last = (json.loads(line)["overall"] for line in done.stdout.splitlines())
    return {
        "accuracy_before": first["avg_at_k"],
        "accuracy_after": last["avg_at_k"],
        "metrics_before": first["metrics"],
        "metrics_after": last["metrics"],
    }


def _books(run_dir: RunDir) -> dict[str, Any]:
    status = json.loads(run_dir.status.read_text())
    summary = json.loads(run_dir.summary.read_text())
    versions = read_json_lines(run_dir.versions)
    steps = read_json_lines(run_dir.metrics)
    return {
        "train_s": summary["train_s"],
        "books_balanced": all(book["balanced"] for book in status["books"]),
        "lost_rollouts": sum(
            drop["count"]
            for book in status["books"]
            for drop in book["drops"]
            if drop["reason"] != "STALE"
        ),
        "staleness_max": max(row["lag/max"] for row in steps),
        "same_weights_mismatch_max": max(
            (row.get("mismatch/same_weights_abs_max", 0.0) for row in steps), default=None
        ),
        "failed_swaps": sum(row["state"] == "failed" for row in versions),
        "pause_ms_max": 1e3 * max((row["pause_s"] or 0.0) for row in versions),
        "hub_peak_rss_mib": round(status["hub"]["max_rss_nbytes"] / 2**20),
        "hub_max_event_ms": round(1e3 * status["hub"]["max_event_s"], 1),
        "weights_nbytes": summary["weights_nbytes"],
    }


def _churn(process: subprocess.Popen[bytes], run_dir: RunDir, recipe: str) -> dict[str, Any]:
    """Kill one node and let another join; return when it served."""
    while len(read_json_lines(run_dir.metrics)) < CHURN_STEP and process.poll() is None:
        time.sleep(POLL_S)
    family = psutil.Process(process.pid).children(recursive=True)
    next(each for each in family if "raas-0" in each.cmdline()).kill()
    endpoint = run_dir.read_endpoint()
    models = [
        part
        for path in sorted((run_dir.root / "checkpoints").iterdir())
        for part in ("--model", f"{path.name}={path / 'step_000000'}")
    ]
    log = run_dir.log("raas-late")
    with log.open("wb") as file:
        late = subprocess.Popen(
            _astraflow(
                "raas", "join", recipe, "--hub", endpoint.address, "--name", "late", *models
            ),
            env={**os.environ, "ASTRAFLOW_JOIN_TOKEN": endpoint.join_token, "OMP_NUM_THREADS": "1"},
            stderr=file,
        )
    late.wait()
    lines = [line.split() for line in log.read_text().splitlines()]
    joined = next(_time(line) for line in lines if "joined" in line)
    live = next(_time(line) for line in lines if "live" in line)
    return {"late_join_to_live_s": round(live - joined, 3), "late_exit_code": late.returncode}


def _time(line: Sequence[str]) -> float:
    return datetime.fromisoformat(line[0]).timestamp()


class _Memory:
    """Samples the resident memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def peaks(self) -> dict[str, int]:
        return {name: nbytes >> 20 for name, nbytes in sorted(self._peaks.items())}

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            with suppress(psutil.Error):
                for each in psutil.Process(self._pid).children(recursive=True):
                    name = _role(each.cmdline())
                    self._peaks[name] = max(self._peaks.get(name, 0), each.memory_info().rss)


def _role(command: Sequence[str]) -> str:
    words = list(command)
    for flag, role in (("--name", "{}"), ("--policy", "trainer-{}")):
        if flag in words:
            name = role.format(words[words.index(flag) + 1])
            return f"{name} (warm-up)" if "warm-up" in words else name
    return "hub" if "serve" in words else "other"


if __name__ == "__main__":
    main()
