"""Metrics of a batch, by the names that dashboards know."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from astraflow.core.rollouts import Outcome
from astraflow.core.samples import FreshGroup, Row
from astraflow.core.status import DropCount


def batch_metrics(groups: Sequence[FreshGroup], *, train_version: int) -> dict[str, float]:
    """Return what the rows of a batch say.

    Args:
        groups: Of the batch, at least one sample each.
        train_version: What the batch trains on; lag is counted from it.
    """
    samples = [sample for group in groups for sample in group.samples]
    rows = [row for sample in samples for row in sample.rows]
    lags = np.array([train_version - sample.min_version for sample in samples])
    rewards = np.array([row.reward for row in rows])
    sampled = np.array([row.trajectory.sampled_count for row in rows])
    stds = np.array(
        [max(row.group_std for sample in group.samples for row in sample.rows) for group in groups]
    )
    truncated = [sample.entry.rollout.outcome is Outcome.TRUNCATED for sample in samples]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "advantage/abs_mean": float(np.mean([abs(row.advantage) for row in rows])),
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        "group/zero_std_frac": float((stds == 0).mean()),
        "response/length/mean": float(sampled.mean()),
        "response/truncated_frac": float(np.mean(truncated)),
        "batch/groups": float(len(groups)),
        "batch/rollouts": float(len(samples)),
        "batch/rows": float(len(rows)),
        "batch/sampled_tokens": float(sampled.sum()),
    } | _part_means(rows)


def replay_metrics(fresh: Sequence[FreshGroup], replayed: Sequence[FreshGroup]) -> dict[str, float]:
    """Return how much of a batch, of at least one group, was trained on before."""
    return {
        "data/replay/rollouts": float(sum(len(group.samples) for group in replayed)),
        "data/replay/frac": len(replayed) / (len(fresh) + len(replayed)),
    }


def drop_metrics(drops: Sequence[DropCount]) -> dict[str, float]:
    """Return how many rollouts were dropped since the start, by reason."""
    found: defaultdict[str, float] = defaultdict(float)
    for drop in drops:
        found[f"buffer/dropped/{drop.reason.lower()}"] += drop.count
    return dict(found)


def time_metrics(token_count: int, *, wait_s: float, train_s: float) -> dict[str, float]:
    """Return how the time from one ack to the next was spent."""
    seconds = wait_s + train_s
    return {
        "time/wait_batch_frac": wait_s / seconds if seconds > 0 else 0.0,
        "time/wait_s": wait_s,
        "time/train_s": train_s,
        "perf/tokens_per_s": token_count / seconds if seconds > 0 else 0.0,
    }


def _part_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each reward part over the rollouts, each counted once."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in {id(row.rollout): row.rollout for row in rows}.values():
        for name, value in rollout.reward_parts.items():
            parts[name].append(value)
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}
