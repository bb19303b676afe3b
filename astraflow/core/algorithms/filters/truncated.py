"""Truncated: rollouts that were cut off are dropped."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.rollouts import Outcome


@dataclass(slots=True, kw_only=True)
class Truncated(RolloutFilter):
    """Keeps rollouts that came to their own end.

    What was cut at a limit of tokens has a reward that says little of what it would have been
    (overlong filtering, DAPO, arXiv 2503.14476, section 3.4).

    Attributes:
        max_share: Drop the whole group when more than this share of it was cut.
    """

    max_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ValueError("max_share must be in [0, 1]")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether it came to its end."""
        is_whole = [rollout.outcome is not Outcome.TRUNCATED for rollout in group.rollouts]
        cut_share = is_whole.count(False) / len(is_whole)
        return is_whole if cut_share <= self.max_share else [False] * len(is_whole)
