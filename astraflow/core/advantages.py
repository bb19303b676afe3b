"""Advantages: how much better a row did than the rows that it is compared with."""

from collections.abc import Sequence

import numpy as np

from astraflow.core.samples import Row

_EPSILON = 1e-6


def group_relative(rewards: np.ndarray, *, scale_by_std: bool) -> np.ndarray:
    """Return reward minus the group's mean, over its deviation where asked for.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2) divides by the standard deviation;
    Dr. GRPO (arXiv 2503.20783) does not. A group of equal rewards gets zeros either way.

    Args:
        rewards: f64[n], one per row of the group.
        scale_by_std: Divide by (population deviation + 1e-6).

    Example:
        >>> group_relative(np.array([1.0, 0.0, 0.0, 1.0]), scale_by_std=False).tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + _EPSILON) if scale_by_std else centred


def stamp(rows: Sequence[Row], *, scale_by_std: bool) -> None:
    """Give the rewarded rows of a group their advantage, and the group's mean and deviation."""
    rewards = np.array([row.reward for row in rows], np.float64)
    mean, std = float(rewards.mean()), float(rewards.std())
    advantages = group_relative(rewards, scale_by_std=scale_by_std).tolist()
    for row, advantage in zip(rows, advantages, strict=True):
        row.advantage = advantage
        row.group_mean = mean
        row.group_std = std
