"""What staleness costs and each correction wins back: every batch exactly so many versions old.

    python benchmarks/staleness.py --json staleness.json --report staleness.md --plot staleness.png
    python benchmarks/staleness.py --seeds 0 --corrections clipped none --steps 40

The sort recipe's task and model in one process, without a hub: at step t the engine samples from
version t, and the trainer trains on what was sampled from version t - lag (from the first one, for
the first steps). All of a seed's cells draw the same prompts. A curve is the mean reward of what
is sampled at each step, from the newest weights; accuracy is that of held-out prompts after the
last step, at temperature 1. Cells that the JSON file has already are not run again.
"""

import argparse
import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Loss, Recipe
from astraflow.core.algorithms.advantages import advantages_of
from astraflow.core.settings import AdvantageSettings
from astraflow.storage.cache import cache_dir
from astraflow.trainers.causal_model import load_causal_model, prepare_torch
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.warm_up import ensure_model
from one_process.engine import EngineSampler
from one_process.task import Row, SortTask

SORT: Final = Path(__file__).parent.parent / "recipes" / "sort.yaml"
LAGS: Final = (0, 8)
BAR: Final = 0.03
# As docs/losses.md has them. The rows of this task have six tokens, not thousands: the mean
# log-ratio of a row spreads more than where GSPO's published range comes from.
CORRECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "clipped": {},
    "none": {"surrogate": "reinforce"},
    "unclipped": {"clip_low": 1.0, "clip_high": 1e6},
    "tis": {"old": "recomputed", "correction": {"high": 2.0}},
    "masked_is": {
        "old": "recomputed",
        "correction": {"style": "mask", "low": 0.5, "high": 2.0},
    },
    "decoupled_ppo": {"old": "recomputed", "correction": {"high": 1000.0}},
    "m2po": {"m2_threshold": 0.04},
    "gspo": {"ratio": "sequence", "mean": "rows", "clip_low": 0.1, "clip_high": 0.14},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"surrogate": "sapo"},
    "dual_clip": {"dual_clip": 3.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training.

    Attributes:
        correction: One of `CORRECTIONS`.
        lag: Versions between sampling and training.
        seed: Of prompts and draws.
    """

    correction: str
    lag: int
    seed: int

    @property
    def name(self) -> str:
        """As in the JSON file."""
        return f"{self.correction}/{self.lag}/{self.seed}"


class Lab:
    """Trains one cell."""

    def __init__(self, cell: Cell, given: argparse.Namespace) -> None:
        recipe = load_recipe(SORT, [f"seed={cell.seed}"])
        self._cell, self._given = cell, given
        self._recipe, self._policy = recipe, recipe.policies["solver"]
        directory = ensure_model(self._policy.model, seed=given.model_seed, cache_dir=cache_dir())
        model = load_causal_model(directory, device="cpu")
        self._loss = Loss.model_validate(CORRECTIONS[cell.correction])
        self._learner = PolicyLearner(model, _trainer(recipe, self._loss, given))
        self._task = SortTask(recipe)
        self._sampler = EngineSampler(
            directory,
            model,
            max_new_tokens=self._policy.sampling.max_new_tokens,
            batch=128,
            seed=cell.seed,
        )

    async def run(self) -> dict[str, Any]:
        """Return the curve, the accuracy and what it took."""
        cpu, prompts = time.process_time(), self._task.draws("train")
        waiting: deque[TrainRows] = deque()
        curve: list[float] = []
        norms: list[float] = []
        await self._sampler.take(0)
        for version in range(self._given.steps):
            for _ in range(self._cell.lag + 1 - len(waiting)):
                rows, reward = await self._sample(prompts)
                waiting.append(rows)
            curve.append(round(reward, 4))
            norms.append(self._train(waiting.popleft())["train/grad_norm"])
            await self._sampler.take(version + 1)
        accuracy = await self._accuracy()
        await self._sampler.close()
        return {
            "accuracy": accuracy,
            "curve": curve,
            "grad_norm_max": round(max(norms), 3),
            "cpu_s": round(time.process_time() - cpu, 2),
        }

    async def _sample(self, prompts: Iterator[Row]) -> tuple[TrainRows, float]:
        """Return a batch and its mean reward."""
        size, count = self._recipe.rollouts.group_size, self._policy.trainer.groups_per_batch
        rows = [row for _ in range(count) for row in [next(prompts)] * size]
        samples = await self._sampler.sample([row["prompt"] for row in rows])
        rewards = self._rewards(rows, samples.completions)
        groups = rewards.reshape(-1, size)
        advantages = [advantages_of(each, AdvantageSettings()) for each in groups]
        return samples.to_rows(np.concatenate(advantages)), float(rewards.mean())

    def _train(self, rows: TrainRows) -> Mapping[str, float]:
        count = rows.row_count if self._loss.mean == "rows" else len(rows.loss)
        return self._learner.step(rows, divisor=count)

    async def _accuracy(self) -> float:
        rows = self._task.first("held_out", self._given.held_out)
        samples = await self._sampler.sample([row["prompt"] for row in rows])
        return float(self._rewards(rows, samples.completions).mean())

    def _rewards(self, rows: Sequence[Row], completions: Sequence[np.ndarray]) -> np.ndarray:
        return self._task.rewards(rows, map(self._sampler.text, completions))


def _trainer(recipe: Recipe, loss: Loss, given: argparse.Namespace) -> Any:
    trainer = recipe.policies["solver"].trainer
    optimizer = trainer.optimizer.model_copy(
        update={"learning_rate": given.learning_rate, "decay": None}
    )
    updates = {"minibatches": given.minibatches, "epochs": given.epochs}
    return trainer.model_copy(update={"loss": loss, "optimizer": optimizer, **updates})


def report(cells: Mapping[str, Any], given: argparse.Namespace) -> str:
    """Return the table of what there is, as Markdown."""
    lines = [
        f"{given.steps} steps of {given.minibatches} x {given.epochs} updates at a learning rate "
        f"of {given.learning_rate}. "
        "Mean held-out accuracy and its standard error over seeds.\n",
        "| correction | " + " | ".join(f"lag {lag}" for lag in LAGS) + " | lost | seeds |",
        "|---|" + "---:|" * (len(LAGS) + 2),
    ]
    for correction in CORRECTIONS:
        found = [_accuracies(cells, correction, lag) for lag in LAGS]
        if all(map(len, found)):
            shown = " | ".join(map(_shown, found))
            lost = np.mean(found[0]) - np.mean(found[-1])
            lines.append(f"| {correction} | {shown} | {lost:.3f} | {min(map(len, found))} |")
    return "\n".join(lines) + "\n"


def _accuracies(cells: Mapping[str, Any], correction: str, lag: int) -> list[float]:
    return [
        cell["accuracy"]
        for name, cell in cells.items()
        if name.rpartition("/")[0] == f"{correction}/{lag}"
    ]


def _shown(values: Sequence[float]) -> str:
    """Return the mean, and its standard error where there are several seeds."""
    mean = f"{np.mean(values):.3f}"
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return mean if error is None else f"{mean} ± {error:.3f}"


def plot(cells: Mapping[str, Any], path: Path) -> None:
    """Draw the mean curve of every correction, one panel per lag."""
    from matplotlib import pyplot  # noqa: PLC0415 - an extra

    figure, panels = pyplot.subplots(1, len(LAGS), figsize=(12, 5), sharey=True)
    for panel, lag in zip(panels, LAGS, strict=True):
        for index, correction in enumerate(CORRECTIONS):
            start = f"{correction}/{lag}/"
            curves = [cell["curve"] for name, cell in cells.items() if name.startswith(start)]
            if curves:
                style = {"color": f"C{index // 2}", "linestyle": ("-", "--")[index % 2]}
                panel.plot(_smooth(np.mean(curves, axis=0)), label=correction, **style)
        panel.set(title=f"lag {lag}", xlabel="step", ylabel="reward of the newest weights")
    panels[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _smooth(curve: np.ndarray, width: int = 5) -> np.ndarray:
    return np.convolve(curve, np.ones(width) / width, mode="valid")


def asked_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return what all cells of a file have in common."""
    names = ("steps", "learning_rate", "minibatches", "epochs", "model_seed", "held_out")
    return {name: getattr(given, name) for name in names}


def summary(cells: Mapping[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Return the bar: what clipping loses at the longest lag."""
    found = [_accuracies(cells, "clipped", lag) for lag in LAGS]
    lost = float(np.mean(found[0]) - np.mean(found[-1])) if all(map(len, found)) else None
    return {
        "asked": asked_of(given),
        "clipped_lost": lost,
        "bar": BAR,
        "holds": lost is not None and lost >= BAR,
        "load": os.getloadavg()[0],
        "cells": cells,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lags", type=int, nargs="+", default=[*LAGS])
    parser.add_argument("--corrections", nargs="+", default=[*CORRECTIONS], choices=CORRECTIONS)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--model-seed", type=int, default=0, help="of the warm-up")
    parser.add_argument("--held-out", type=int, default=1024, help="prompts")
    parser.add_argument("--json", type=Path, default=Path("staleness.json"))
    parser.add_argument("--report", type=Path, help="where to write a table in Markdown")
    parser.add_argument("--plot", type=Path, help="where to draw the curves")
    given = parser.parse_args()
    prepare_torch(thread_count=1)
    cells: dict[str, Any] = {}
    if given.json.exists():
        before = json.loads(given.json.read_text())
        if before["asked"] != asked_of(given):
            parser.error(f"{given.json} has cells of {before['asked']}; name another file")
        cells = before["cells"]
    for seed in given.seeds:
        for correction in given.corrections:
            for lag in given.lags:
                cell = Cell(correction=correction, lag=lag, seed=seed)
                if cell.name in cells:
                    continue
                cells[cell.name] = asyncio.run(Lab(cell, given).run())
                found = cells[cell.name]
                print(cell.name, found["accuracy"], f"{found['cpu_s']} s", flush=True)
                given.json.write_text(json.dumps(summary(cells, given)) + "\n")
    table = report(cells, given)
    print(table)
    if given.report:
        given.report.write_text(table)
    if given.plot:
        plot(cells, given.plot)


if __name__ == "__main__":
    main()
