"""From the end of an optimizer step to the first token of the new version, across a long link.

Real processes: hub and trainer at one end, a node with an embedded engine at the other. The
trainer's master weights are f32; a share of the elements moves by one unit of bf16 per step. What
is told per version, in seconds from the end of the step:

- encode: master weights rounded to bf16, compared with the version before, coded, digests made;
- announce: the hub has registered it; the node hears of it half a round trip later;
- transfer: asked for, and every chunk is there and verified;
- decode: the new state is made and verified;
- swap: in the engine, with what that does beside generation (`pause` is what it does not);
- token: one was sampled with it.

Once with an idle engine and once while streams are decoded. Needs root.

    python benchmarks/publish_to_live.py --rounds 50 --json publish_to_live.json
    python benchmarks/publish_to_live.py --model tiny --rounds 5
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from link import PROFILES, End, Link, Profile
from link.needs import exit_without_link
from live_ends.run import SHAPES, write_model

STAGES: Final = (
    ("encode", "stepped", "encoded"),
    ("announce", "encoded", "heard"),
    ("transfer", "heard", "arrived"),
    ("decode", "arrived", "decoded"),
    ("swap", "decoded", "swapped"),
    ("token", "swapped", "token"),
    ("total", "stepped", "token"),
)
PUBLISHED_NBYTES: Final = 6  # u32 index, bf16 value
BARS_S: Final = {0: 0.70, 4: 1.0}


def measure(given: argparse.Namespace, *, streams: int) -> dict[str, Any]:
    """Return the stages of every version, with so many sequences being decoded."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_model(Path(folder), given.model)
        link = stack.enter_context(Link(PROFILES[given.profile], tuned=given.row == "tuned"))
        address = link.near.address
        hub = stack.enter_context(End(link.near, "live_ends.hub", address, folder)).hear()
        numbers = (str(given.share), str(given.threads))
        trainer = End(*(link.near, "live_ends.trainer", hub["address"], address, folder, *numbers))
        stack.enter_context(trainer)
        parameters = trainer.hear()["parameters"]
        engine = (str(streams), given.dtype, str(given.threads))
        node = stack.enter_context(End(link.far, "live_ends.node", hub["address"], folder, *engine))
        first = node.hear()
        node.tell("go")
        rounds = [_round(trainer, node, given.settle) for _ in range(given.warm_up + given.rounds)]
        return {
            "parameters": parameters,
            "published_format_wire_s": round(_published_s(rounds, link.profile), 3),
            "first_version_s": round(first["token"] - first["heard"], 3),
            **summary(rounds[given.warm_up :]),
        }


def _published_s(rounds: Sequence[Mapping[str, Any]], profile: Profile) -> float:
    """Return what the published format (index and raw value) needs for its bytes alone."""
    changed = statistics.median(each["changed"] for each in rounds)
    return profile.ideal_s(round(changed * PUBLISHED_NBYTES))


def _round(trainer: End, node: End, settle_s: float) -> dict[str, Any]:
    time.sleep(settle_s)
    trainer.tell("step")
    published, lived = trainer.hear(), node.hear()
    if published["version"] != lived["version"]:
        raise RuntimeError(f"{published['version']} was published, {lived['version']} is live")
    return {**published, **lived}


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians by stage, and what else is worth knowing."""
    spans = {name: [each[end] - each[start] for each in rounds] for name, start, end in STAGES}
    spans["pause"] = [each["pause_s"] for each in rounds]
    totals = sorted(spans["total"])
    return {
        "changed": statistics.median(each["changed"] for each in rounds),
        "patch_nbytes": statistics.median(each["patch_nbytes"] for each in rounds),
        "pulled_nbytes": statistics.median(each["pulled_nbytes"] for each in rounds),
        "p50_s": {name: round(statistics.median(of), 4) for name, of in spans.items()},
        "p95_total_s": round(totals[int(0.95 * (len(totals) - 1))], 4),
        "totals_s": [round(each, 4) for each in spans["total"]],
    }


def line(streams: int, result: Mapping[str, Any]) -> str:
    """Return a line for people."""
    stages = "  ".join(f"{name} {seconds:.3f}" for name, seconds in result["p50_s"].items())
    bar = f"bar {BARS_S[streams]:.2f}" if streams in BARS_S else "no bar"
    per_change = result["pulled_nbytes"] / max(1, result["changed"])
    return (
        f"{streams} streams: p50 {result['p50_s']['total']:.3f} s ({bar}),"
        f" p95 {result['p95_total_s']:.3f} s; {result['pulled_nbytes']:,.0f} B,"
        f" {per_change:.2f} per change (published format: at least"
        f" {result['published_format_wire_s']:.2f} s for its bytes alone)\n  {stages}"
    )


def main() -> None:
    given = _arguments()
    exit_without_link()
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "settings": {name: str(value) for name, value in vars(given).items()},
        "streams": {},
    }
    for streams in given.streams:
        load = os.getloadavg()
        result = measure(given, streams=streams)
        report["streams"][streams] = {"load_before": load, **result}
        print(line(streams, result), flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="256m", choices=list(SHAPES))
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--profile", default="100mbit-100ms", choices=list(PROFILES))
    parser.add_argument("--row", default="tuned", choices=["stock", "tuned"])
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds between rounds")
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"], help="of the engine")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
