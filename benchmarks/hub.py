"""The hub under load over real gRPC: rollouts in and batches out, one batch's way, and a flood.

The hub is a process on one core; a node and a trainer whose work costs nothing drive it from the
other. Groups of 8 rollouts, 1,000 tokens each, in messages of up to 64 items.

- `throughput`: as many rollouts as there can be, or `--rate`, with each kind of journal.
- `many`: the same from 64 and 256 nodes with 2 rollouts per message and from 256 with one, each on
  a connection of its own.
- `callbacks`: both again, with a look at every callback of the hub's event loop: its thread's CPU.
- `handover`: 256 rollouts of 4,000 tokens, from the last one until the trainer has parsed all.
- `flood`: a node that ignores its credit and sends for ever, while the trainer stands still; then
  it goes on, and every rollout that was accepted has to be trained on.

    python benchmarks/hub.py --seconds 10 --json hub.json
    python benchmarks/hub.py --rows flood --flood-seconds 600
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from hub_ends.flood import Bounds, measure_flood
from hub_ends.handover import measure_handover
from hub_ends.process import GROUP_SIZE, GROUPS_PER_BATCH, MODES, HubProcess, running_hub
from hub_ends.throughput import ITEM_COUNT, Row, measure_callbacks, measure_throughput

BARS: Final = {
    "in_per_s": 2500.0,
    "hub_cpu_us_per_rollout": {"1x64": 150.0, "64x2": 250.0, "256x1": 400.0},
    "out_per_s": 2500.0,
    "ack_p99_ms": 50.0,
    "callback_max_ms": 50.0,
    "handover_p50_ms": 60.0,
    "lost": 0,
}
ROWS: Final = ("throughput", "many", "callbacks", "handover", "flood")
MANY: Final = ((64, 2), (256, 2), (256, 1))
_STALE: Final[dict[str, Any]] = {"max_staleness": 8}

Measure = Callable[[HubProcess], Awaitable[Row]]


def main() -> None:
    """Print a line per measurement, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.0, help="rollouts per second; 0: no limit")
    parser.add_argument("--batches", type=int, default=50, help="of handover")
    parser.add_argument("--flood-seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    psutil.Process().cpu_affinity([1 % (os.cpu_count() or 1)])
    before = os.getloadavg()
    rows = asyncio.run(_measure_all(options))
    if options.json:
        report = {"bars": BARS, "load_average": before, "rate": options.rate, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


async def _measure_all(options: argparse.Namespace) -> dict[str, Row]:
    """Measure in one event loop: gRPC keeps to the first one that it sees."""
    rows: dict[str, Row] = {}
    for name in options.rows:
        for label, mode, measure, recipe in _plan(name, options):
            with (
                tempfile.TemporaryDirectory() as folder,
                running_hub(Path(folder), mode, **recipe) as hub,
            ):
                rows[label] = await measure(hub)
            shown = {
                key: round(value, 1) if isinstance(value, float) else value
                for key, value in rows[label].items()
            }
            print(label, shown, flush=True)
    return rows


def _plan(name: str, options: argparse.Namespace) -> list[tuple[str, str, Measure, dict[str, Any]]]:
    """Return the measurements of a row: label, journal, what to do, and the recipe's changes."""
    rate = options.rate * (GROUP_SIZE + 1) / GROUP_SIZE
    if name == "throughput":
        measure: Measure = partial(
            measure_throughput, seconds=options.seconds, token_count=options.tokens, rate=rate
        )
        return [(f"throughput/{mode}", mode, measure, dict(_STALE)) for mode in options.modes]
    if name == "many":
        return [
            (
                f"many/{node_count}x{item_count}",
                "process",
                partial(
                    measure_throughput,
                    seconds=options.seconds,
                    token_count=options.tokens,
                    rate=rate,
                    node_count=node_count,
                    item_count=item_count,
                ),
                dict(_STALE),
            )
            for node_count, item_count in MANY
        ]
    if name == "callbacks":
        load = {"seconds": options.seconds, "token_count": options.tokens, "rate": rate}
        return [
            (
                f"callbacks/{node_count}x{item_count}",
                "process",
                partial(measure_callbacks, node_count=node_count, item_count=item_count, **load),
                _STALE | {"is_watched": True},
            )
            for node_count, item_count in ((1, ITEM_COUNT), *MANY)
        ]
    if name == "handover":
        measure = partial(measure_handover, token_count=4000, batch_count=options.batches)
        return [("handover", "process", measure, {"max_staleness": 0})]
    bounds = Bounds(
        open_group_count=(_STALE["max_staleness"] + 1) * GROUPS_PER_BATCH,
        token_count=options.tokens,
        compact_nbytes=1 << 26,
    )
    measure = partial(measure_flood, seconds=options.flood_seconds, bounds=bounds)
    recipe = _STALE | {"compact_nbytes": bounds.compact_nbytes}
    return [("flood", "process", measure, recipe)]


if __name__ == "__main__":
    main()
