"""Useful share: a batch in which too little teaches anything is refused."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.points import CLOSE, BatchGuard
from astraflow.core.samples import FreshGroup


@dataclass(slots=True, kw_only=True)
class UsefulShare(BatchGuard):
    """Finds groups of equal rewards when more than so many are in the batch.

    Example: with min_share 0.75 a batch of four has room for one group of equal rewards; of two
    such groups the later one is at fault.

    Attributes:
        min_share: Of the groups whose rewards differ.
    """

    min_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise ValueError("min_share must be in [0, 1]")

    def unfit(self, groups: Sequence[FreshGroup]) -> Collection[int]:
        """Return the positions of those of equal rewards that are too many, the last ones."""
        flat = [index for index, group in enumerate(groups) if _is_flat(group)]
        allowed = int((1 - self.min_share) * len(groups) + CLOSE)
        return flat[allowed:]


def _is_flat(group: FreshGroup) -> bool:
    rewards = [row.reward for sample in group.samples for row in sample.rows]
    return max(rewards) - min(rewards) <= CLOSE
