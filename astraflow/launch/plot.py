"""The picture of a run: reward over the steps, a line per policy."""

from pathlib import Path
from typing import Any

from astraflow.config.run_dir import RunDir, read_json_lines

_WINDOW = 10


def draw_reward(run_dir: RunDir) -> Path | None:
    """Draw `reward.png`; None without matplotlib (extra `plot`) or without steps."""
    rows = [row for row in read_json_lines(run_dir.metrics) if row.get("reward/mean") is not None]
    if not rows:
        return None
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    plt: Any = pyplot
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for policy in sorted({row["policy"] for row in rows}):
        _draw_policy(axes, policy, [row for row in rows if row["policy"] == policy])
    marks = _eval_marks(run_dir)
    if marks:
        axes.scatter(*zip(*marks, strict=True), marker="D", s=36, color="black", zorder=3)
        axes.scatter([], [], marker="D", s=36, color="black", label="held-out accuracy")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(run_dir.plot)
    plt.close(figure)
    return run_dir.plot


def _draw_policy(axes: Any, policy: str, rows: list[dict[str, Any]]) -> None:
    steps = [row["step"] for row in rows]
    rewards = [row["reward/mean"] for row in rows]
    smooth = [
        sum(rewards[max(0, i - _WINDOW + 1) : i + 1]) / min(i + 1, _WINDOW)
        for i in range(len(rewards))
    ]
    (line,) = axes.plot(steps, smooth, label=f"{policy}, mean of {_WINDOW} steps")
    axes.plot(steps, rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)


def _eval_marks(run_dir: RunDir) -> list[tuple[int, float]]:
    """Where the held-out accuracies lie: at the version of the suite's first policy."""
    return [
        (min(row["versions"].values()), row["overall"]["avg_at_k"])
        for row in read_json_lines(run_dir.evals)
        if row["state"] == "succeeded"
    ]
