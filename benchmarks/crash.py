"""Kill the processes of a run, at named places and at random, and check its books in the end.

Every run has a hub, two nodes and a trainer as processes of their own, on real sockets and with a
real journal. kill -9 ends one after the other; another takes its place. In the end nothing that
was acknowledged may be lost, no rollout may be in two batches that count, every task has ended
once, and what the trainer knows is what the journal says.

    python benchmarks/crash.py --json crash.json
    python benchmarks/crash.py --runs 2 --kills 12
    python benchmarks/crash.py --runs 1 --kills 30 --hub-every 1
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from crash_ends.kills import draw_kills, kills_of_hubs
from crash_ends.run import Report, crash_run


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.first, arguments.first + arguments.runs):
            reports.append(_one(arguments.folder or Path(folder), number, arguments))
            _tell(number, reports[-1])
    report = _summed(reports, time.monotonic() - started, seed=arguments.seed)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    raise SystemExit(0 if report["is_good"] else 1)


def _one(folder: Path, number: int, arguments: argparse.Namespace) -> Report:
    chance = Random(1000 * arguments.seed + number)
    root = folder / f"run-{number}"
    if arguments.hub_every:
        hubs = kills_of_hubs(arguments.kills, every_s=arguments.hub_every)
        return crash_run(root, hubs, chance=chance)
    is_compacting = number % 2 == 1
    others = arguments.kills - (5 if is_compacting else 0)
    few = max(1, others // 8)
    kills = draw_kills(
        chance,
        points=others // 2,
        hubs=others - others // 2 - 2 * few,
        nodes=few,
        trainers=few,
        compacting=is_compacting,
    )
    nbytes = 1 << 16 if is_compacting else 1 << 28
    return crash_run(root, kills, chance=chance, compact_nbytes=nbytes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=21, help="of each run, 12 at least")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument(
        "--hub-every", type=float, default=0.0, help="kill nobody but the hub, every so many s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the runs' folders")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _tell(number: int, report: Report) -> None:
    verdict = report.verdict
    print(
        f"run {number}: {sum(report.kills.values())} kills in {report.seconds:.1f} s, "
        f"{verdict.acked} acknowledged, {verdict.trained} trained on, "
        f"{verdict.undone} batches undone, "
        f"missed {dict(report.missed)}, faults {list(verdict.faults)[:5]}",
        flush=True,
    )


def _summed(reports: list[Report], seconds: float, *, seed: int) -> dict[str, object]:
    kills, missed = Counter[str](), Counter[str]()
    for report in reports:
        kills += report.kills
        missed += report.missed
    faults = [fault for report in reports for fault in report.verdict.faults]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "runs": len(reports),
        "kills": sum(kills.values()),
        "kills_by_place": dict(sorted(kills.items())),
        "missed": dict(missed),
        "acknowledged": sum(report.verdict.acked for report in reports),
        "trained": sum(report.verdict.trained for report in reports),
        "batches_undone": sum(report.verdict.undone for report in reports),
        "faults": faults,
        "is_good": not faults,
    }


if __name__ == "__main__":
    main()
