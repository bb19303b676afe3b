"""Runs that are interrupted with Ctrl-C at random times, in every phase, and then gone on with.

    python benchmarks/interrupts.py --count 100 --json interrupts.json

Each is `astraflow run recipes/sort.yaml`, with a warm-up of its own, for a few steps. Some time
after it was started, be that in the warm-up, while it joins, trains or ends, it gets SIGINT, and
half a second later another. Told is how long it lived then, and whether a process of it did for
longer. `--resume` goes on with it to its end, where every step was recorded once, in order, and the
books hold. What ended before its SIGINT, or had not made its folder, counts as such.
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
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil

from astraflow.config.run_dir import RunDir, read_json_lines

SORT: Final = Path(__file__).parent.parent / "recipes" / "sort.yaml"
STEP_COUNT: Final = 6
SETTINGS: Final = (
    f"policies.solver.trainer.step_count={STEP_COUNT}",
    "policies.solver.trainer.checkpoint_every=2",
    "data.held_out.limit=32",
)
# The second where there was nothing to end any more, or not yet.
STOPPED: Final = (130, -signal.SIGINT)


def main() -> None:
    given = arguments()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        most_s = undisturbed_s(Path(folder))
        print(f"one that is left alone takes {most_s:.1f} s", flush=True)
        rows = [interrupted(Path(folder), n, rng.uniform(0, most_s)) for n in range(given.count)]
    stop_s = sorted(row["stop_s"] for row in rows if "stop_s" in row)
    result: dict[str, Any] = {
        "benchmark": "interrupts",
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "stop_s_p50": stop_s[len(stop_s) // 2] if stop_s else None,
        "stop_s_max": stop_s[-1] if stop_s else None,
        "faults": [row for row in rows if row["faults"]],
    }
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result | {"rows": rows}, indent=2) + "\n")
    raise SystemExit(bool(result["faults"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def undisturbed_s(folder: Path) -> float:
    """Return how long a run takes that is not interrupted."""
    options = [part for each in SETTINGS for part in ("--set", each)]
    began_s = time.monotonic()
    run = started(
        folder / "alone.log", folder / "cache", str(SORT), "--runs", str(folder), *options
    )
    if run.wait(300):
        raise SystemExit((folder / "alone.log").read_text())
    return time.monotonic() - began_s


def interrupted(folder: Path, number: int, wait_s: float) -> dict[str, Any]:
    """Interrupt one run after some seconds, go on with it, and say what came of it."""
    name = f"run-{number}"
    run_dir, log = RunDir(folder / name), folder / f"{name}.log"
    # Another length is another model, and so is made.
    settings = (*SETTINGS, f"policies.solver.model.warm_up.step_count={30 + number % 10}")
    options = [part for each in settings for part in ("--set", each)]
    row: dict[str, Any] = {"number": number, "wait_s": round(wait_s, 2), "faults": []}
    run = started(log, folder / "cache", str(SORT), "--runs", str(folder), "--name", name, *options)
    try:
        row["outcome"] = f"ended with {run.wait(wait_s)}"
    except subprocess.TimeoutExpired:
        row |= stop(run)
        row["outcome"] = "stopped" if row["code"] in STOPPED else f"exit code {row['code']}"
        row["faults"] += [f"{count} processes were left" for count in [row.pop("left")] if count]
        if row["code"] not in (0, *STOPPED):
            row["faults"].append(log.read_text()[-2000:])
    if not run_dir.journal.exists():
        row["outcome"] += ", before it began"
    else:
        row["steps"] = len(read_json_lines(run_dir.metrics))
        row["faults"] += go_on(run_dir, log, folder / "cache")
    print(
        f"  {row['outcome']:32} after {wait_s:5.1f} s, ended in {row.get('stop_s', 0):.1f} s;"
        f" steps {row.get('steps', 0)}{'; AT FAULT' if row['faults'] else ''}",
        flush=True,
    )
    return row


def started(log: Path, cache: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "astraflow", "run", *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "XDG_CACHE_HOME": str(cache)}
        )


def stop(run: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Send Ctrl-C twice; return how long it lived then, and how many of its processes do."""
    processes = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    try:
        run.wait(0.5)
    except subprocess.TimeoutExpired:
        processes += psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    code = run.wait(60)
    left = [each for each in processes if each.is_running() and each.status() != "zombie"]
    return {"stop_s": round(time.monotonic() - began_s, 2), "code": code, "left": len(left)}


def go_on(run_dir: RunDir, log: Path, cache: Path) -> list[str]:
    """Resume a run to its end; return what is wrong with it."""
    status = json.loads(run_dir.status.read_text()) if run_dir.status.exists() else {}
    done = [each["step"] for each in status.get("policies", [])]
    if done != [STEP_COUNT] or status["state"] != "done":
        code = started(log, cache, "--resume", str(run_dir.root)).wait(300)
        if code:
            return [f"resumed, it ended with {code}: {log.read_text()[-2000:]}"]
    rows = read_json_lines(run_dir.metrics)
    # A step whose weights were lost is done again; the last line of it counts.
    steps = list({row["step"]: row for row in rows})
    ledger = subprocess.run(
        [sys.executable, "-m", "astraflow", "ledger", str(run_dir.root)],
        capture_output=True,
        text=True,
        check=False,
    )
    faults = [] if ledger.returncode == 0 else [f"the books do not hold: {ledger.stdout}"]
    if steps != list(range(1, STEP_COUNT + 1)):
        faults.append(f"steps {steps}")
    return faults


if __name__ == "__main__":
    main()
