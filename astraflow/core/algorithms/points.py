"""The points at which data algorithms plug in, one small protocol each.

An algorithm is a dataclass, whose options are its fields.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import ClassVar

from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import Rollout
from astraflow.core.samples import FreshGroup, Sample
from astraflow.core.tasks import Prompt


class PlugIn:
    """Base of all data algorithms.

    An algorithm is a dataclass. Its fields are the options that a recipe sets; fields with
    `init=False` are its state, which snapshots keep: plain values only (numbers, text, None,
    lists, tuples, dicts, sets). It decides by what it is told alone, so that a replay of the
    journal comes to the same: no clock, no files, no chance but that of the dice it is given.
    """

    __slots__ = ()

    reads_tokens: ClassVar[bool] = False
    """Whether it reads tokens, masks, log-probabilities or columns of trajectories. One that does
    is refused by a recipe with `rollouts.payloads`, whose run may not have them."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the log, by short names."""
        return {}


@dataclass(slots=True, kw_only=True)
class Dice:
    """Chance that can be repeated: the k-th roll depends on the seed and k alone.

    Attributes:
        salt: Tells the dice of one run apart.
        count: Rolls so far.
    """

    seed: int
    salt: str
    count: int = 0

    def roll(self) -> float:
        """Return a number in [0, 1)."""
        self.count += 1
        digest = blake2b(f"{self.seed}/{self.salt}/{self.count}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


# Rewards that differ by no more are equal.
CLOSE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of the rollouts of a prompt.

    Attributes:
        rewards: Of the rollouts that have one, in the order of their samples.
    """

    prompt: Prompt
    rewards: tuple[float, ...]

    @property
    def mean_reward(self) -> float:
        """Over the rewarded rollouts; 0 where there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether all rewards are equal, so that the group teaches nothing."""
        return not self.rewards or max(self.rewards) - min(self.rewards) <= CLOSE


class PromptSelector(PlugIn):
    """Decides whether a prompt is worth its rollouts now.

    Prompts come in the order of the data set; one that is not admitted is passed over until the
    next pass. Several selectors of a recipe all have to admit it.
    """

    __slots__ = ()

    def admits(self, prompt: Prompt, dice: Dice) -> bool:
        """Whether to ask for rollouts of a prompt."""
        del prompt, dice
        return True

    def note(self, outcome: GroupOutcome) -> None:
        """Learn what became of a prompt; comes once per group."""

    def begin_version(self, version: int) -> None:
        """Learn that the trainer published weights, version 1 and on."""

    def end_warm_up(self) -> None:
        """Learn that as many prompts as there are rows came up since version 1; comes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGroup:
    """A group that is complete, as one policy sees it.

    Attributes:
        policy_id: Who would train on it.
        prompt: What it answers.
        samples: Its rewarded rollouts that no filter dropped so far; at least one.
        train_version: Version that the next batch trains on, counted as the samples' `min_version`
            is: without those that have the weights of the version before.
        run_time: Since the start of the run.
    """

    policy_id: PolicyId
    prompt: Prompt
    samples: tuple[Sample, ...]
    train_version: int
    run_time: timedelta

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """One per sample."""
        return tuple(sample.entry.rollout for sample in self.samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        """One per row that would be trained on: the trajectory's own, else the rollout's."""
        return tuple(row.reward for sample in self.samples for row in sample.rows)


class RolloutFilter(PlugIn):
    """Decides what of a whole group is kept; what it drops is in the books under its name.

    Filters run in the order of the recipe, each on what the one before kept, and before
    advantages are computed. A group that too little is left of (`min_group_size`) is dropped, and
    another prompt is asked for in its place.
    """

    __slots__ = ()

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether it is kept."""
        raise NotImplementedError

    def masks(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample that is kept whether it counts for baselines alone.

        It is in the batch with a loss mask of zeros. A group of nothing else is dropped.
        """
        return [False] * len(group.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedGroup:
    """A group that was trained on and may be again.

    Attributes:
        group: Its samples.
        use_count: Batches that it was in.
        staleness: Of its oldest sample, in the next batch.
    """

    group: FreshGroup
    use_count: int
    staleness: int


class ReplayOrder(PlugIn):
    """Decides which groups that were trained on are trained on again.

    It is asked about those alone that are fresh enough and were not used too often, oldest first.
    """

    __slots__ = ()

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        """Return the positions of up to `count` groups; 0 < count <= len(groups)."""
        raise NotImplementedError

    def loss_weights(self, groups: Sequence[UsedGroup], picked: Sequence[int]) -> Sequence[float]:
        """Return a factor on the loss of each group that was picked, in that order."""
        del groups
        return [1.0] * len(picked)


class BatchGuard(PlugIn):
    """Refuses a batch that should not be trained on.

    The fresh groups that are at fault are dropped, under the guard's name, and the batch is drawn
    again from what is there and what comes. After `max_refusals` refusals in a row the batch is
    served as it is: a guard slows a run down, it never stops it.
    """

    __slots__ = ()

    def unfit(self, groups: Sequence[FreshGroup]) -> Collection[int]:
        """Return the positions of the groups that are at fault; none: the batch is fine."""
        raise NotImplementedError
