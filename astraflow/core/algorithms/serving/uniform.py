"""Uniform: everything that may be replayed is equally likely to be."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import ReplayOrder, UsedGroup


@dataclass(slots=True, kw_only=True)
class UniformReplay(ReplayOrder):
    """Picks without repetition, each set of groups with the same probability."""

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        """Return positions: the first of a shuffle (Fisher and Yates)."""
        places = list(range(len(groups)))
        for index in range(count):
            other = index + int(dice.roll() * (len(places) - index))
            places[index], places[other] = places[other], places[index]
        return places[:count]
