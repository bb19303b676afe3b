"""A trainer that is killed again and again, against one that is not: same curve, same weights.

    python benchmarks/resume.py --json resume.json
    python benchmarks/resume.py --kills 2 --steps 8

Both are `astraflow run recipes/sort.yaml` with one rollout node and no staleness, in processes of
their own. The trainer of one is killed with SIGKILL at random moments; its launcher starts it again
from its last checkpoint. What counts of `metrics.jsonl` is the last line of every step. Numbers
that tell of time, versions or the pool are left out.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from safetensors.numpy import load_file

from astraflow.config.run_dir import RunDir, read_json_lines
from verdict import conclude

SORT: Final = Path(__file__).parent.parent / "recipes" / "sort.yaml"
SETTINGS: Final = (
    "policies.solver.trainer.max_staleness=0",
    "policies.solver.trainer.prefetch=1",
    "raas.count=1",
    "hub.session_ttl_s=1",
    "evals={}",
)
COMPARED: Final = ("train/", "reward/", "advantage/", "group/", "response/", "batch/")
# Kills come at most so long after a step.
MOST_DELAY_S: Final = 0.5


@contextmanager
def running(runs: Path, name: str, settings: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; it is gone afterwards."""
    options = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "astraflow", "run", str(SORT), "--runs", str(runs)]
    with (runs / f"{name}.log").open("wb") as out:
        process = subprocess.Popen([*command, "--name", name, *options], stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def recorded(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the lines of the policy's steps."""
    return [row for row in read_json_lines(run_dir.metrics) if row["policy"] == "solver"]


def wait_for_step(
    process: subprocess.Popen[bytes], run_dir: RunDir, step: int, *, after: int
) -> None:
    """Wait until a step is recorded, and more lines than there were.

    Raises:
        RuntimeError: The run ended before.
    """
    while len(rows := recorded(run_dir)) <= after or rows[-1]["step"] < step:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before step {step}: {run_dir.root}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


def kill_trainer(process: subprocess.Popen[bytes]) -> bool:
    """Kill the trainer that there is; return whether there was one."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = child.cmdline()
            if "trainer" in line and "--policy" in line:
                child.send_signal(signal.SIGKILL)
                psutil.wait_procs([child], timeout=10)
                return True
    return False


def train(
    runs: Path, name: str, settings: Sequence[str], kills: Sequence[tuple[int, float]]
) -> Any:
    """Run to the end; return what it came to.

    Args:
        runs: Where the run's folder goes.
        name: Of the run.
        settings: Of the recipe.
        kills: Steps that are waited for, and seconds from then to the kill.
    """
    run_dir, started, done, lines = RunDir(runs / name), time.perf_counter(), 0, 0
    with running(runs, name, settings) as process:
        for step, delay_s in kills:
            wait_for_step(process, run_dir, step, after=lines)
            with suppress(subprocess.TimeoutExpired):
                process.wait(delay_s)
            done += kill_trainer(process)
            lines = len(recorded(run_dir))
        code = process.wait()
    rows = recorded(run_dir)
    last = run_dir.checkpoint("solver", rows[-1]["step"])
    return {
        "code": code,
        "kills": done,
        "wall_s": round(time.perf_counter() - started, 1),
        "lines": len(rows),
        "metrics": {row["step"]: compared(row) for row in rows},
        "weights": load_file(last / "model.safetensors"),
    }


def compared(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step that training alone decides."""
    return {name: value for name, value in row.items() if name.startswith(COMPARED)}


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far two runs are from each other."""
    steps = sorted(left["metrics"].keys() | right["metrics"].keys())
    apart: dict[str, float] = {}
    first: int | None = None
    for step in steps:
        one, other = left["metrics"].get(step, {}), right["metrics"].get(step, {})
        for name in one.keys() | other.keys():
            # What is no number, or is not there, is apart from everything.
            gap = abs(one.get(name, np.nan) - other.get(name, np.nan))
            apart[name] = float(np.maximum(apart.get(name, 0.0), gap))
            if gap and first is None:
                first = step
    weights = [abs(array - right["weights"][name]).max() for name, array in left["weights"].items()]
    return {
        "steps": len(steps),
        "first_step_apart": first,
        "metrics_apart": {name: gap for name, gap in sorted(apart.items()) if gap},
        "weights_apart": float(np.max(weights)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--set", action="append", default=[], help="a.b=c of the recipe")
    parser.add_argument("--runs", type=Path, help="where the runs stay; unset: they go")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    steps = sorted(chance.sample(range(1, given.steps - 1), given.kills))
    kills = [(step, chance.uniform(0, MOST_DELAY_S)) for step in steps]
    settings = [
        *SETTINGS,
        f"policies.solver.trainer.step_count={given.steps}",
        f"policies.solver.trainer.checkpoint_every={given.checkpoint_every}",
        *given.set,
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = given.runs or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        whole = train(runs, "whole", settings, [])
        killed = train(runs, "killed", settings, kills)
    found = differences(whole, killed)
    result = {
        **found,
        "kills": killed["kills"],
        "codes": [whole["code"], killed["code"]],
        "lost_steps": killed["lines"] - whole["lines"],
        "wall_s": [whole["wall_s"], killed["wall_s"]],
        "final": killed["metrics"][given.steps],
        "load": os.getloadavg()[0],
        "holds": killed["kills"] == given.kills
        and whole["code"] == killed["code"] == 0
        and not found["metrics_apart"]
        and not found["weights_apart"],
    }
    print(json.dumps(result, indent=2))
    conclude(result, given.json)


if __name__ == "__main__":
    main()
