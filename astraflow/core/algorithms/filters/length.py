"""Length: rollouts that are too short or too long are dropped."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.points import RolloutFilter, WholeGroup


@dataclass(slots=True, kw_only=True)
class Length(RolloutFilter):
    """Keeps rollouts by the tokens that were sampled for the policy, over all its trajectories.

    Example: with max_tokens 100, of rollouts with 80, 100 and 101 sampled tokens the last is
    dropped, and the advantages are those of a group of two.

    Attributes:
        min_tokens: Fewest.
        max_tokens: Most; None: any number.
    """

    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError("max_tokens is below min_tokens")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether its length is in range."""
        counts = [
            sum(row.trajectory.sampled_count for row in sample.rows) for sample in group.samples
        ]
        most = self.max_tokens
        return [self.min_tokens <= n and (most is None or n <= most) for n in counts]
