"""A pool of different nodes against one of equal nodes of the same total speed.

The hub, the nodes and the wire between them are the real ones, in one process; engines take a set
time per token. Different: 100, 60 and 30 % of a speed, and nodes of 100 and 60 % behind a round
trip of 300 ms. Equal: as many nodes of the mean speed, near. The trainer takes nearly as long per
batch as either pool needs to sample it. What counts is the share of its time that it waits for a
batch.

    python benchmarks/placement.py --steps 40 --json placement.json
"""

import argparse
import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import read_json_lines
from astraflow.testing import small_recipe, start_run
from verdict import conclude

BAR: Final = 0.05
TOKEN_S: Final = 0.05
GROUP: Final = 8
CAPACITY: Final = 16
SETTLE: Final = 5
LETTERS: Final = "abcdefghijklmnop"


@dataclass(frozen=True, slots=True)
class Engine:
    """One node: its speed, 1 is `TOKEN_S` per token, and its way to the hub."""

    speed: float
    round_trip_s: float = 0.0


DIFFERENT: Final = (Engine(1.0), Engine(0.6), Engine(0.3), Engine(1.0, 0.3), Engine(0.6, 0.3))
MEAN: Final = sum(engine.speed for engine in DIFFERENT) / len(DIFFERENT)
EQUAL: Final = (Engine(MEAN),) * len(DIFFERENT)


def answer(text: str) -> str:
    """Long prompts have long answers: 8 to 24 letters."""
    return LETTERS[0] * (8 + len(text) % 17)


def recipe_for(folder: Path, args: argparse.Namespace) -> Recipe:
    rows = [{"prompt": LETTERS[0] * (20 + 7 * n % 17), "answer": "?"} for n in range(512)]
    changes = {
        "policies.solver.trainer.groups_per_batch": args.groups,
        "policies.solver.trainer.max_staleness": args.staleness,
        "policies.solver.trainer.step_count": args.steps,
        "policies.solver.sampling.max_new_tokens": 64,
        "rollouts.group_size": GROUP,
        "hub.journal": {"kind": "none"},
        "hub.session_ttl_s": 3,
    }
    return small_recipe(folder, scorer="exact", prompts=rows, changes=changes)


async def measure(engines: tuple[Engine, ...], args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_for(folder, args)
        async with start_run(recipe, run_dir=folder / "run") as run:
            run.add_trainer(step_s=args.step_s)
            for engine in engines:
                await run.add_node(
                    answer=answer,
                    capacity=CAPACITY,
                    token_s=TOKEN_S / engine.speed,
                    round_trip_s=engine.round_trip_s,
                )
            await run.finish(timeout_s=600)
            accounts = run.accounts()
        rows = read_json_lines(folder / "run" / "metrics.jsonl")[SETTLE:]
    wait_s = sum(row["time/wait_s"] for row in rows)
    train_s = sum(row["time/train_s"] for row in rows)
    assert all(account.is_balanced for account in accounts)
    drops = {drop.reason: drop.count for account in accounts for drop in account.drops}
    return {
        "nodes": [[engine.speed, engine.round_trip_s] for engine in engines],
        "wait_fraction": wait_s / (wait_s + train_s),
        "step_s": (wait_s + train_s) / len(rows),
        "stale": drops.get("STALE", 0),
        "trained": sum(account.trained_count for account in accounts),
        "lag": sum(row["lag/mean"] for row in rows) / len(rows),
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    print(f"{'pool':12}{'waits':>8}{'s/step':>9}{'stale':>8}{'lag':>7}")
    result: dict[str, Any] = {"load": os.getloadavg()[0], "bar": BAR}
    for name, engines in (("equal", EQUAL), ("different", DIFFERENT)):
        row = result[name] = await measure(engines, args)
        print(
            f"{name:12}{row['wait_fraction']:8.1%}{row['step_s']:9.2f}{row['stale']:8}"
            f"{row['lag']:7.2f}",
            flush=True,
        )
    result["difference"] = result["different"]["wait_fraction"] - result["equal"]["wait_fraction"]
    result["holds"] = result["difference"] <= BAR
    print(f"difference {result['difference']:+.1%} (bar {BAR:.0%})")
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=2.0, help="seconds of one step")
    parser.add_argument("--groups", type=int, default=16, help="groups per batch")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    conclude(asyncio.run(main(chosen)), chosen.json)
