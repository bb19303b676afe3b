"""The points at which data algorithms plug in, one small protocol each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from astraflow.core.algorithms.plug_in import Dice, PlugIn
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import Rollout
from astraflow.core.samples import FreshGroup, Sample
from astraflow.core.tasks import Prompt

# Rewards that differ by no more are equal.
CLOSE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of the rollouts of a prompt.

    Attributes:
        prompt: Which.
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
        train_version: Version that the next batch trains on.
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
