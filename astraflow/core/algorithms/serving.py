"""Batch serving: what is replayed, and which batches are refused."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log

from astraflow.core.algorithms.points import CLOSE, BatchGuard, Dice, ReplayOrder, UsedGroup
from astraflow.core.samples import FreshGroup


@dataclass(slots=True, kw_only=True)
class Latest(ReplayOrder):
    """Picks the newest groups. Example: two of four are those at 2 and 3."""

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        del dice
        return range(len(groups) - count, len(groups))


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


@dataclass(slots=True, kw_only=True)
class Prioritised(ReplayOrder):
    """Picks without repetition, with weights that grow with the size of the advantages.

    The weight of a group is (mean |advantage| + offset) ** alpha * staleness_decay ** staleness
    (proportional prioritisation: arXiv 1511.05952, section 3.3). The draw without repetition is
    that of Efraimidis and Spirakis (2006): the largest log(u) / weight win. Example, with alpha 1
    and offset 0: of groups with mean |advantage| 0.3 and 0.1, equally stale, the first is picked
    three times as often.

    What is picked more often counts for less: with N groups to pick from, of which one is picked
    with probability P, its loss has the weight (N P) ** -beta, over the largest of these (section
    3.4). Example: with beta 1 the first group above has the weight 1/3, the second one 1. Where all
    are picked there was no choice: all weights are 1.

    Attributes:
        alpha: 0: all alike; 1: in proportion.
        offset: Keeps groups of equal rewards from never being picked.
        staleness_decay: Factor for each version of staleness.
        beta: 0: no weights; 1: what is trained on has no bias by the choice.
        beta_batches: Over so many batches with replays beta rises to 1, linearly; None: it stays.
        batch_count: Batches so far.
    """

    alpha: float = 1.0
    offset: float = 0.01
    staleness_decay: float = 1.0
    beta: float = 0.0
    beta_batches: int | None = None
    batch_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.offset < 0 or not 0 < self.staleness_decay <= 1:
            raise ValueError("alpha and offset must be at least 0, staleness_decay in (0, 1]")
        if not 0 <= self.beta <= 1 or (self.beta_batches is not None and self.beta_batches < 1):
            raise ValueError("beta must be in [0, 1], beta_batches at least 1")

    def weight(self, used: UsedGroup) -> float:
        """Return how likely a group is to be picked, relative to others."""
        rows = [row for sample in used.group.samples for row in sample.rows]
        size = sum(abs(row.advantage) for row in rows) / len(rows)
        return (size + self.offset) ** self.alpha * self.staleness_decay**used.staleness

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        self.batch_count += 1
        keys = [log(1 - dice.roll()) / weight for weight in self._weights(groups)]
        return sorted(range(len(groups)), key=lambda index: -keys[index])[:count]

    def loss_weights(self, groups: Sequence[UsedGroup], picked: Sequence[int]) -> Sequence[float]:
        if len(picked) == len(groups):
            return [1.0] * len(picked)
        weights = self._weights(groups)
        # (N P) ** -beta over the largest of them: N and the sum of the weights cancel out.
        least, beta = min(weights), self._beta
        return [(weights[index] / least) ** -beta for index in picked]

    @property
    def _beta(self) -> float:
        if self.beta_batches is None:
            return self.beta
        share = min(1.0, (self.batch_count - 1) / self.beta_batches)
        return self.beta + share * (1 - self.beta)

    def _weights(self, groups: Sequence[UsedGroup]) -> list[float]:
        return [max(self.weight(used), 1e-12) for used in groups]


@dataclass(slots=True, kw_only=True)
class DistinctPrompts(BatchGuard):
    """Finds groups whose prompt is in the batch already. Example: of a, b, a the last one."""

    def unfit(self, groups: Sequence[FreshGroup]) -> Collection[int]:
        first: dict[str, int] = {}
        for index, group in enumerate(groups):
            first.setdefault(group.head.prompt_id, index)
        return set(range(len(groups))) - set(first.values())


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
        rewards = [[row.reward for each in group.samples for row in each.rows] for group in groups]
        flat = [index for index, own in enumerate(rewards) if max(own) - min(own) <= CLOSE]
        allowed = int((1 - self.min_share) * len(groups) + CLOSE)
        return flat[allowed:]
