"""50 MB over an emulated long link: our lanes and, in the same run, what there is otherwise.

Per profile and per row of kernel settings (stock, tuned) two processes, one at each end:

- first: all connections are made anew, and the kernel has forgotten what it knew of the way;
- warm: connections are kept (the published system keeps none), after 10 s of silence on them.

Subjects take turns, so that the silence of one is filled by the others. Needs root.

    python benchmarks/wan.py --repeats 20 --json wan.json
    python benchmarks/wan.py --profiles 1gbit-300ms --rows tuned --subjects lanes "warm stream"

`--busy 2` has as many processes compute for ever beside them.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from link import PROFILES, End, Link, Profile
from link.ceiling import measured_ceiling
from link.needs import exit_without_link
from wan_ends.puller import SUBJECTS

KEEPS_NONE: Final = frozenset({"published"})


class Row:
    """One link with one row of settings, and what was measured on it."""

    def __init__(self, link: Link, far: End, given: argparse.Namespace) -> None:
        self._link = link
        self._far = far
        self._given = given
        self._silent_since: dict[str, float] = {}

    def measure(self) -> dict[str, Any]:
        """Return seconds by subject, first and warm."""
        names: Sequence[str] = self._given.subjects
        times = {name: {"first": list[float](), "warm": list[float]()} for name in names}
        for _ in range(self._given.first_repeats):
            for name in names:
                self._forget()
                times[name]["first"].append(self._pull(f"{name}:first"))
        for _ in range(self._given.repeats):
            for name in names:
                self._wait_for_silence(name)
                times[name]["warm"].append(self._pull(name))
        return {name: {mode: _told(of[mode]) for mode in of} for name, of in times.items()}

    def _pull(self, what: str) -> float:
        self._far.tell(what)
        answer = self._far.hear()
        self._silent_since[what.partition(":")[0]] = time.monotonic()
        if answer["nbytes"] < self._given.nbytes * 0.999:
            raise RuntimeError(f"{what} brought {answer['nbytes']} bytes")
        return answer["seconds"]

    def _wait_for_silence(self, name: str) -> None:
        if name not in KEEPS_NONE:
            passed_s = time.monotonic() - self._silent_since.get(name, -math.inf)
            time.sleep(max(0.0, self._given.silence - passed_s))

    def _forget(self) -> None:
        """Let the kernel forget windows and round trips of connections that are closed."""
        for host in (self._link.near, self._link.far):
            host.run(["ip", "tcp_metrics", "flush"], check=False)


def measure(profile: Profile, given: argparse.Namespace, *, tuned: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        link = stack.enter_context(Link(profile, tuned=tuned))
        address = link.near.address
        near = stack.enter_context(End(link.near, "wan_ends.source", address, str(given.nbytes)))
        places = json.dumps(near.hear())
        far = stack.enter_context(End(link.far, "wan_ends.puller", address, places))
        subjects = Row(link, far, given).measure()
        return {"settings": link.settings(), "subjects": subjects, "dropped": _dropped(link)}


def _dropped(link: Link) -> float:
    """Return the share of packets that were lost on the way to the far end."""
    flow = link.count().to_far
    return flow.dropped / max(1, flow.dropped + flow.packets)


def _told(seconds: Sequence[float]) -> dict[str, Any] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p95": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 3),
        "min": round(ordered[0], 3),
        "all": [round(each, 3) for each in seconds],
    }


def table(name: str, row: str, ideal_s: float, result: Mapping[str, Any]) -> str:
    """Return the lines of one row."""
    lines = [f"{name}, {row}: at least {ideal_s:.2f} s, {result['dropped']:.2%} dropped"]
    for subject, of in result["subjects"].items():
        cells = [
            f"{mode} p50 {told['p50']:6.2f} p95 {told['p95']:6.2f}"
            for mode, told in of.items()
            if told
        ]
        lines.append(f"  {subject:12} {'   '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    given = _arguments()
    exit_without_link()
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "nbytes": given.nbytes,
        "silence_s": given.silence,
        "busy": given.busy,
        "queue_ms": given.queue_ms,
        "ceiling_mbit_per_s": measured_ceiling(),
    }
    print(f"ceiling of the link: {report['ceiling_mbit_per_s']:,.0f} Mbit/s", flush=True)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.busy)]
    try:
        report["profiles"] = _measure_all(given)
    finally:
        for each in busy:
            each.kill()
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def _measure_all(given: argparse.Namespace) -> dict[str, Any]:
    profiles: dict[str, Any] = {}
    for name in given.profiles:
        profile = replace(PROFILES[name], queue_ms=given.queue_ms)
        for row in given.rows:
            result = measure(profile, given, tuned=row == "tuned")
            profiles.setdefault(name, {})[row] = result
            print(table(name, row, profile.ideal_s(given.nbytes), result), flush=True)
    return profiles


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    rows = ("stock", "tuned")
    parser.add_argument("--rows", nargs="+", default=list(rows), choices=rows)
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--nbytes", type=int, default=50_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="warm transfers per subject")
    parser.add_argument("--first-repeats", type=int, default=3, help="first transfers per subject")
    parser.add_argument("--silence", type=float, default=10.0, help="seconds before a warm one")
    parser.add_argument("--queue-ms", type=float, help="of the link; default: a round trip")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
