"""Latest: what was trained on last is replayed first."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import ReplayOrder, UsedGroup


@dataclass(slots=True, kw_only=True)
class Latest(ReplayOrder):
    """Picks the newest groups. Example: two of four are those at 2 and 3."""

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        """Return the last positions."""
        del dice
        return range(len(groups) - count, len(groups))
