"""Lose the host of a hub and measure how long it is until another one answers its members.

The journal is in PostgreSQL. The hub's host is a network namespace whose cable is cut; with --kill,
or without the right to make one, the hub is killed with SIGKILL. The hub, the one that waits, two
nodes and a trainer are processes of their own; in the end every accepted rollout has been trained
on, once, and the ledger holds.

    sudo python benchmarks/takeover.py --json takeover.json
    python benchmarks/takeover.py --kill
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from crash_ends.takeover import take_over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease", type=float, default=5.0, help="hub.journal.lease_s")
    parser.add_argument("--kill", action="store_true", help="kill the hub; its host stays")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cuts = not arguments.kill and os.getuid() == 0
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.repeats):
            report = take_over(Path(folder, str(number)), cuts=cuts, lease_s=arguments.lease)
            print(report)
            runs.append(asdict(report))
    served = sorted(run["served_s"] for run in runs)
    result = {
        "loss": "cable cut" if cuts else "SIGKILL",
        "lease_s": arguments.lease,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "served_s": {"median": served[len(served) // 2], "max": served[-1]},
        "is_exact": not any(run["verdict"]["faults"] or run["untrained"] for run in runs),
        "runs": runs,
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(0 if result["is_exact"] else 1)


if __name__ == "__main__":
    main()
