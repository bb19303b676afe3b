"""Rollouts of 32,000 tokens by reference, and the same with their arrays in them.

The hub is a process on one core; nodes and a trainer whose work costs nothing drive it from the
other, over real sockets. Nobody generates tokens: a node leaves an empty object in the store, a
folder, for the hub to remove, and the trainer takes batches as they come.

- `reference`: messages of 64, 128 and 256 rollouts from one node, and of two from 64 nodes.
- `inline`: messages of 64; what the hub then takes of CPU and memory, and sends and is sent.
- `store`: what real arrays cost a node that writes them and a rank that reads them, without routed
  experts and with those of 48 layers, 8 each.

The rate that counts is `per_core_per_s`, by the hub's own CPU: wall time on a machine that others
use says little.

    python benchmarks/payloads.py --seconds 10 --json payloads.json
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from astraflow.client.payloads import MARKER, PayloadReader, PayloadWriter
from astraflow.core.packing import Share, laid_out
from astraflow.core.rollouts import (
    ROUTED_EXPERTS,
    Column,
    ColumnAxis,
    PayloadStore,
    Rollout,
    VersionSpan,
)
from astraflow.core.samples import Row
from astraflow.storage.buckets import Bucket
from hub_ends.process import POLICY, running_hub
from hub_ends.throughput import measure_throughput
from made_up import made_up_rollout, made_up_trajectory

BARS: Final = {"per_core_per_s": 10_000, "hub_cpu_fraction": 1.0, "rss_peak_mb": 300}
# Label: rollouts of a message, nodes, whether by reference.
ROWS: Final[dict[str, tuple[int, int, bool]]] = {
    "reference/1x64": (64, 1, True),
    "reference/1x128": (128, 1, True),
    "reference/1x256": (256, 1, True),
    "reference/64x2": (2, 64, True),
    "inline/1x64": (64, 1, False),
}
# With arrays in them, as many open rollouts as with references would take gigabytes of the hub.
_STALENESS: Final = {True: 8, False: 2}
_LAYERS: Final = 48
_EXPERTS: Final = 8
_SHARE_COUNT: Final = 16


def main() -> None:
    """Print a line per measurement, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "store"], default=[*ROWS, "store"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rate", type=float, default=0.0, help="rollouts per second; 0: no limit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    psutil.Process().cpu_affinity([1 % (os.cpu_count() or 1)])
    before = os.getloadavg()
    rows = asyncio.run(_measure_all(options))
    if "reference/1x64" in rows and "inline/1x64" in rows:
        rows["ratio"] = _ratio(rows["reference/1x64"], rows["inline/1x64"])
        print("ratio", rows["ratio"])
    if options.json:
        report = {"bars": BARS, "load_average": before, "tokens": options.tokens, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


async def _measure_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure in one event loop: gRPC keeps to the first one that it sees."""
    rows: dict[str, dict[str, Any]] = {}
    for label in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            if label == "store":
                rows[label] = await _measure_store(Path(folder), options.tokens)
            else:
                rows[label] = await _measure_hub(Path(folder), label, options)
        shown = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in rows[label].items()
        }
        print(label, shown, flush=True)
    return rows


async def _measure_hub(folder: Path, label: str, options: argparse.Namespace) -> dict[str, Any]:
    item_count, node_count, has_payloads = ROWS[label]
    store = folder / "store" if has_payloads else None
    with running_hub(
        folder, "process", max_staleness=_STALENESS[has_payloads], payloads=store
    ) as hub:
        row = await measure_throughput(
            hub,
            seconds=options.seconds,
            token_count=options.tokens,
            rate=options.rate,
            node_count=node_count,
            item_count=item_count,
            has_payloads=has_payloads,
        )
        left = None if store is None else sum(1 for _ in store.rglob("*-*"))
    return row | {
        "per_core_per_s": 1e6 / row["hub_cpu_us_per_rollout"],
        "objects_left": left,
    }


def _ratio(reference: dict[str, Any], inline: dict[str, Any]) -> dict[str, float]:
    """Return how much more the hub does by reference, and of what it takes less."""
    return {
        "per_core": reference["per_core_per_s"] / inline["per_core_per_s"],
        "in_per_s": reference["in_per_s"] / inline["in_per_s"],
        "bytes_per_rollout": (
            (inline["sent_bytes_per_rollout"] + inline["received_bytes_per_rollout"])
            / (reference["sent_bytes_per_rollout"] + reference["received_bytes_per_rollout"])
        ),
        "rss": inline["rss_peak_mb"] / reference["rss_peak_mb"],
    }


async def _measure_store(folder: Path, token_count: int) -> dict[str, Any]:
    """Return how fast one process writes payloads, and makes parts of them."""
    bucket = Bucket(f"file://{folder}/store")
    bucket.write(MARKER, b"")
    writer = PayloadWriter(PayloadStore(url=bucket.url, above_nbytes=0))
    found: dict[str, Any] = {}
    for name, has_routes in (("plain", False), ("routed", True)):
        rollouts = [_rollout(number, token_count, has_routes) for number in range(_SHARE_COUNT)]
        started, cpu_started = time.perf_counter(), time.process_time()
        sent = await asyncio.gather(*map(writer.put, rollouts))
        write_s, write_cpu_s = (
            time.perf_counter() - started,
            time.process_time() - cpu_started,
        )
        nbytes = sum(each.trajectories[0].payload.nbytes for each in sent if each.trajectories)
        parts = tuple(_share(sent))
        started, cpu_started = time.perf_counter(), time.process_time()
        fetched = await PayloadReader().parts(bucket.url, parts, max_tokens=0)
        for part in fetched:
            await asyncio.to_thread(laid_out, part, (POLICY,))
        read_s, read_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        found |= {
            f"{name}_mb_per_rollout": nbytes / _SHARE_COUNT / 1e6,
            f"{name}_write_mb_per_s": nbytes / write_s / 1e6,
            f"{name}_write_cpu_ms_per_rollout": 1e3 * write_cpu_s / _SHARE_COUNT,
            f"{name}_read_mb_per_s": nbytes / read_s / 1e6,
            f"{name}_read_cpu_ms_per_rollout": 1e3 * read_cpu_s / _SHARE_COUNT,
        }
    return found


def _rollout(number: int, token_count: int, has_routes: bool) -> Rollout:
    spans = [VersionSpan(version=0, length=token_count - 100)]
    trajectory = made_up_trajectory(f"r{number}", POLICY, spans, prompt_count=100)
    if has_routes:
        routes = np.zeros((token_count, _LAYERS, _EXPERTS), np.uint16)
        column = Column(axis=ColumnAxis.TOKEN, values=routes)
        trajectory = replace(trajectory, columns={ROUTED_EXPERTS: column})
    return made_up_rollout(trajectory, rollout_id=f"r{number}", sample_index=number)


def _share(rollouts: list[Rollout]) -> Share:
    rows = [
        Row(trajectory=one, rollout=each, reward=1.0, min_version=0, max_version=0)
        for each in rollouts
        for one in each.trajectories
    ]
    return Share("b", rows, max_tokens=0, group_indexes={"g": 0})


if __name__ == "__main__":
    main()
