"""Prioritised: groups that teach more are replayed more often."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import ReplayOrder, UsedGroup


@dataclass(slots=True, kw_only=True)
class Prioritised(ReplayOrder):
    """Picks without repetition, with weights that grow with the size of the advantages.

    The weight of a group is (mean |advantage| + offset) ** alpha * staleness_decay ** staleness
    (proportional prioritisation: arXiv 1511.05952, section 3.3). The draw without repetition is
    that of Efraimidis and Spirakis (2006): the largest log(u) / weight win. Example, with alpha 1
    and offset 0: of groups with mean |advantage| 0.3 and 0.1, equally stale, the first is picked
    three times as often.

    Attributes:
        alpha: 0: all alike; 1: in proportion.
        offset: Keeps groups of equal rewards from never being picked.
        staleness_decay: Factor for each version of staleness.
    """

    alpha: float = 1.0
    offset: float = 0.01
    staleness_decay: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.offset < 0 or not 0 < self.staleness_decay <= 1:
            raise ValueError("alpha and offset must be at least 0, staleness_decay in (0, 1]")

    def weight(self, used: UsedGroup) -> float:
        """Return how likely a group is to be picked, relative to others."""
        rows = [row for sample in used.group.samples for row in sample.rows]
        size = sum(abs(row.advantage) for row in rows) / len(rows)
        return (size + self.offset) ** self.alpha * self.staleness_decay**used.staleness

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        """Return positions, likeliest first where all else is equal."""
        keys = [log(1 - dice.roll()) / max(self.weight(used), 1e-12) for used in groups]
        return sorted(range(len(groups)), key=lambda index: -keys[index])[:count]
