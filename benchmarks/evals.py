"""Training with an evaluation beside it on a tenth of the pool, against training alone.

The hub, the nodes and the wire between them are the real ones, in one process; engines take a set
time per token. The suite is asked for again and again, always at the newest version, for as long as
training goes on. Every token of every evaluation is checked against the version that was pinned.

    python benchmarks/evals.py --json evals.json
    python benchmarks/evals.py --step-s 0.2 --token-s 0.15   # the pool is the bottleneck
    python benchmarks/evals.py --step-s 0.2 --token-s 0.15 --extra 0   # the share is training's
"""

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import read_json_lines
from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import LiveRun, small_recipe, start_run
from verdict import conclude

BAR: Final = 0.95
NODES: Final = 2
CAPACITY: Final = 40
GROUP: Final = 4
GROUPS: Final = 16
SETTLE: Final = 5
LETTER: Final = "a"


def answer(text: str) -> str:
    """8 to 24 letters."""
    return LETTER * (8 + len(text) % 17)


def recipe_for(folder: Path, args: argparse.Namespace) -> Recipe:
    rows = [{"prompt": LETTER * (20 + 7 * n % 17), "answer": "?"} for n in range(512)]
    part = {"data_set": "train", "workflow": "main", "repeats": args.repeats}
    changes = {
        "policies.solver.trainer.groups_per_batch": GROUPS,
        "policies.solver.trainer.max_staleness": 2,
        "policies.solver.trainer.step_count": args.steps,
        "policies.solver.sampling.max_new_tokens": 64,
        "rollouts.group_size": GROUP,
        "data.train.limit": 64,
        "evals": {
            "suite": {
                "data_sets": [part],
                "at_start": False,
                "at_end": False,
                "pool_share": args.share,
            }
        },
        "hub.journal": {"kind": "none"},
    }
    return small_recipe(folder, scorer="exact", prompts=rows, changes=changes)


class Witness:
    """Looks at every evaluation rollout as the hub takes it."""

    def __init__(self, run: LiveRun) -> None:
        self.tokens = Counter[str]()
        self._run, self._apply = run.hub.run, run.hub.run.apply
        run.hub.run.apply = self._look

    def _look(self, event: Any, now: datetime, **more: Any) -> Any:
        if isinstance(event, ev.RolloutArrived):
            assignment = self._run._components.tasks.assignments.get(event.rollout.task_id)  # noqa: SLF001
            if assignment is not None and assignment.is_eval:
                self._count(event.rollout, assignment.task.versions)
        return self._apply(event, now, **more)

    def _count(self, rollout: Any, versions: Any) -> None:
        for trajectory in rollout.trajectories:
            pinned = versions[trajectory.policy_id].max
            for span in trajectory.version_spans:
                self.tokens["right" if span.version == pinned else "wrong"] += span.length


async def evaluate_for_ever(run: LiveRun, done: list[str]) -> None:
    control = await run.control()
    while True:
        try:
            asked = await control.evals.create("suite")
            states = [str(seen.state) async for seen in control.evals.watch(asked.eval_run_id)]
            done.append(states[-1])
        except AstraflowError as error:
            if error.reason is Reason.RUN_ENDED:
                return
            await asyncio.sleep(0.1)


async def measure(args: argparse.Namespace, *, has_eval: bool) -> dict[str, Any]:
    done: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_for(folder, args)
        async with start_run(recipe, run_dir=folder / "run") as run:
            witness = Witness(run)
            run.add_trainer(step_s=args.step_s)
            for _ in range(NODES):
                await run.add_node(
                    answer=answer, capacity=CAPACITY, eval_extra=args.extra, token_s=args.token_s
                )
            asking = asyncio.create_task(evaluate_for_ever(run, done)) if has_eval else None
            await run.finish(timeout_s=600)
            if asking is not None:
                asking.cancel()
                await asyncio.wait({asking})
        rows = read_json_lines(folder / "run" / "metrics.jsonl")[SETTLE:]
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    span_s = (times[-1] - times[0]).total_seconds()
    wait_s = sum(row["time/wait_s"] for row in rows)
    return {
        "rollouts_per_s": (len(rows) - 1) * GROUPS * GROUP / span_s,
        "wait_fraction": wait_s / (wait_s + sum(row["time/train_s"] for row in rows)),
        "evals": dict(Counter(done)),
        "eval_tokens": dict(witness.tokens),
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"load": os.getloadavg()[0], "bar": BAR, "share": args.share}
    print(f"{'training':14}{'rollouts/s':>12}{'waits':>8}  evaluations")
    for name, has_eval in (("alone", False), ("with a suite", True)):
        row = result[name] = await measure(args, has_eval=has_eval)
        print(
            f"{name:14}{row['rollouts_per_s']:12.1f}{row['wait_fraction']:8.1%}"
            f"  {row['evals']} tokens {row['eval_tokens']}",
            flush=True,
        )
    with_suite = result["with a suite"]
    result["throughput"] = with_suite["rollouts_per_s"] / result["alone"]["rollouts_per_s"]
    is_exact = (
        with_suite["eval_tokens"].get("right", 0) > 0 == with_suite["eval_tokens"].get("wrong", 0)
    )
    result["holds"] = result["throughput"] >= BAR and is_exact
    print(f"throughput {result['throughput']:.1%} (bar {BAR:.0%}), versions exact: {is_exact}")
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--step-s", type=float, default=0.8, help="seconds of one step")
    parser.add_argument("--token-s", type=float, default=0.05, help="seconds of one token")
    parser.add_argument("--extra", type=int, default=4, help="raas.eval_extra of a node")
    parser.add_argument("--repeats", type=int, default=1, help="rollouts per prompt of the suite")
    parser.add_argument("--share", type=float, default=0.1, help="of the pool, for the suite")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    conclude(asyncio.run(main(chosen)), chosen.json)
