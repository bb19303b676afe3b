"""Reward range: groups that are too hard or too easy on the whole are dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from astraflow.core.algorithms.points import RolloutFilter, WholeGroup


@dataclass(slots=True, kw_only=True)
class RewardRange(RolloutFilter):
    """Keeps a group whose mean reward lies in a range, both ends included.

    Example: with low 0.2 and high 0.8, rewards 1, 0, 0, 0 (mean 0.25) are kept, and 1, 1, 1, 1
    are dropped.

    Attributes:
        low: Least mean reward.
        high: Largest mean reward.
    """

    low: float = -inf
    high: float = inf

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether the group as a whole is kept."""
        mean = sum(group.rewards) / len(group.rewards)
        return [self.low <= mean <= self.high] * len(group.samples)
