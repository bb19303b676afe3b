"""Runs plain.yaml and cpu.yaml with several seeds, and draws held-out accuracy by rollouts used.

    python recipes/math-efficient-data/compare.py --seeds 0 1 2 --runs runs

What is there already is not run again. A rollout is used when it was asked for: those that are
filtered out, turn stale or are never trained on count, those of evaluations do not.
"""

import argparse
import json
import subprocess
import sys
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
GROUP_SIZE = 8
# Evaluations that are averaged: one alone has a standard error of a point.
WINDOW = 3
COLORS = {"plain": "tab:gray", "cpu": "tab:blue"}
LABELS = {"plain": "plain", "cpu": "GRESO, dynamic sampling, replay"}

Curve = list[tuple[int, float]]


def run(recipe: str, seed: int, runs: Path) -> Path:
    folder = runs / f"{recipe}-{seed}"
    if not (folder / "summary.json").exists():
        path = HERE / f"{recipe}.yaml"
        if not path.exists():
            path = HERE / "recipe.yaml"  # as `astraflow init` calls it
        command = [sys.executable, "-m", "astraflow", "run", str(path),
                   "--set", f"seed={seed}", "--runs", str(runs), "--name", folder.name]  # fmt: skip
        subprocess.run(command, check=True)  # noqa: S603 - our own words
    return folder


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_curve(folder: Path) -> Curve:
    """Return (rollouts used until a version was published, held-out accuracy of it) in order."""
    used = {0: 0}
    for step in lines(folder / "metrics.jsonl"):
        groups = step["data/select/seen"] - step["data/select/skipped"]
        used[int(step["step"])] = int(groups) * GROUP_SIZE
    # One that was not finished has no result.
    evals = [row for row in lines(folder / "evals.jsonl") if row["overall"] is not None]
    found = {row["versions"]["solver"]: row["overall"]["mean_reward"] for row in evals}
    return [(used[version], found[version]) for version in sorted(found)]


def smooth(curve: Curve) -> Curve:
    """Return the mean of every WINDOW neighbours, on both axes."""
    parts = [curve[i : i + WINDOW] for i in range(len(curve) - WINDOW + 1)]
    return [(round(fmean(x for x, _ in part)), fmean(y for _, y in part)) for part in parts]


def used_until(curve: Curve, accuracy: float) -> float | None:
    """Return after how many rollouts a curve first reaches an accuracy; None: it does not."""
    if curve[0][1] >= accuracy:
        return curve[0][0]
    for (x, y), (next_x, next_y) in pairwise(curve):
        if next_y >= accuracy:
            return x + (next_x - x) * (accuracy - y) / (next_y - y)
    return None


def at(curve: Curve, used: float) -> float | None:
    """Return the accuracy of a curve after so many rollouts; None: beyond its ends."""
    index = bisect_right([x for x, _ in curve], used)
    if index in (0, len(curve)):
        return None
    (x, y), (next_x, next_y) = curve[index - 1 : index + 1]
    return y + (next_y - y) * (used - x) / (next_x - x)


def mean_curve(curves: list[Curve]) -> Curve:
    places = sorted({x for curve in curves for x, _ in curve})
    found = [(x, [at(curve, x) for curve in curves]) for x in places]
    return [(x, fmean(ys)) for x, ys in found if None not in ys]


def tell(curves: dict[str, dict[int, Curve]]) -> None:
    """Print the rollouts that both need for what plain reaches at its end, seed by seed."""
    for seed, plain in curves["plain"].items():
        goal = smooth(plain)[-1][1]
        needs = {name: used_until(smooth(of[seed]), goal) for name, of in curves.items()}
        if needs["cpu"] is None:
            best = max(y for _, y in smooth(curves["cpu"][seed]))
            print(f"seed {seed}: {goal:.3f} is not reached, only {best:.3f}")
            continue
        share = needs["plain"] / needs["cpu"]
        print(
            f"seed {seed}: {plain[0][1]:.3f} at the start, {goal:.3f} after {needs['plain']:,.0f} "
            f"rollouts plain and {needs['cpu']:,.0f} efficient, {share:.1f} times fewer"
        )


def draw(curves: dict[str, dict[int, Curve]], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), dpi=100)
    for name, of in curves.items():
        for curve in of.values():
            axes.plot(*zip(*smooth(curve), strict=True), color=COLORS[name], alpha=0.3, linewidth=1)
        mean = mean_curve([smooth(curve) for curve in of.values()])
        axes.plot(*zip(*mean, strict=True), color=COLORS[name], linewidth=2, label=LABELS[name])
    axes.set(xlabel="rollouts used", ylabel="held-out accuracy")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path, default=HERE / "curve.png")
    given = parser.parse_args()
    curves = {
        name: {seed: read_curve(run(name, seed, given.runs)) for seed in given.seeds}
        for name in ("plain", "cpu")
    }
    tell(curves)
    draw(curves, given.plot)


if __name__ == "__main__":
    main()
