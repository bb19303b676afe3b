"""Inject faults into the weight plane, and compare what is live with the true bytes after each.

Bit flips, truncations, reorderings, duplicates, wrong bases and damaged headers are done to what
passes between a publisher and pullers, wire bytes included. Streams of a TCP lane are spoiled on
their way; relays that lie, processes that are killed and disks that run full are real ones. A
corruption is silent when what is live, or held, is not one version whole: judged by its bytes,
never by a digest.

    python benchmarks/faults.py --json faults.json
    python benchmarks/faults.py --share 0.1
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from fault_ends.plan import WITHOUT_COPY, Quotas, run_all
from fault_ends.trial import NUMBERS, Counts


def main() -> None:
    arguments = _arguments()
    full = Quotas()
    quotas = Quotas(
        messages=round(full.messages * arguments.share),
        states=round(full.states * arguments.share),
        streams=round(full.streams * arguments.share),
        relays=round(full.relays * arguments.share),
        kills=round(full.kills * arguments.share),
        disks=round(full.disks * arguments.share),
    )
    started = time.monotonic()
    counts = run_all(quotas, seed=arguments.seed, processes=arguments.processes, tell=True)
    report = _report(counts, time.monotonic() - started, arguments)
    _print(counts, report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    raise SystemExit(0 if report["is_good"] else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full quotas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _report(
    counts: dict[str, Counts], seconds: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "share": arguments.share,
        "processes": arguments.processes,
        "seconds": round(seconds, 1),
        "is_good": all(_is_good(name, each) for name, each in counts.items()),
        "classes": {name: each.row() for name, each in counts.items()},
    }


def _is_good(name: str, counts: Counts) -> bool:
    return counts.is_good if name in WITHOUT_COPY else counts.is_safe


def _print(counts: dict[str, Counts], report: dict[str, Any]) -> None:
    print(f"{'class':<16}", *(f"{name:>15}" for name in NUMBERS), f"{'without copy':>13}")
    for name, each in counts.items():
        numbers = (f"{getattr(each, number):>15}" for number in NUMBERS)
        share = each.recovered / max(1, each.injected)
        print(f"{name:<16}", *numbers, f"{share:>12.3%}", "" if _is_good(name, each) else "BAD")
    print(f"{report['seconds']} s in {report['processes']} processes")


if __name__ == "__main__":
    main()
