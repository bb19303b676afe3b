"""Zero advantage: groups whose rewards are all equal are dropped (dynamic sampling)."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.samples import rows_by_agent


@dataclass(slots=True, kw_only=True)
class ZeroAdvantage(RolloutFilter):
    """Keeps a group only if its rewards, of some agent, differ by more than a tolerance.

    Advantages are relative to the rows of the same agent in the group, so that equal rewards give a
    gradient of zero. Dropping such groups and asking other prompts until the batch is full is the
    dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Example: rewards 1, 1, 1 are dropped,
    1, 0, 1 are kept.

    Attributes:
        tolerance: Rewards that differ by no more are equal.
    """

    tolerance: float = 1e-6

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether the group as a whole is kept."""
        rows = (row for sample in group.samples for row in sample.rows)
        rewards = ([row.reward for row in same] for same in rows_by_agent(rows).values())
        differs = any(max(same) - min(same) > self.tolerance for same in rewards)
        return [differs] * len(group.samples)
