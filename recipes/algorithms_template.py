"""Data algorithms to start from: copy this file, keep what you need, and name it in a recipe.

rollouts:
  selectors: [algorithms_template:Coin]
  filters: [{name: algorithms_template:NotTooLong, options: {most: 64}}]
policies:
  solver:
    trainer:
      replay: {ratio: 0.3, order: algorithms_template:Hardest}
      guards: [algorithms_template:NotTooOld]

docs/algorithms.md tells what to keep to.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.core.algorithms.points import (
    BatchGuard,
    Dice,
    GroupOutcome,
    PromptSelector,
    ReplayOrder,
    RolloutFilter,
    UsedGroup,
    WholeGroup,
)
from astraflow.core.samples import FreshGroup
from astraflow.core.tasks import Prompt


@dataclass(kw_only=True)
class Coin(PromptSelector):
    """Asks for a prompt that was answered before only now and then."""

    chance: float = 0.5
    """Options are fields; a recipe sets them, and their types are checked."""
    answered: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """State is a field with init=False; snapshots keep it."""

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        if not 0 < self.chance <= 1:
            raise ValueError("chance must be in (0, 1]")

    def admits(self, prompt: Prompt, dice: Dice) -> bool:
        """Whether to ask for rollouts of a prompt."""
        return prompt.prompt_id not in self.answered or dice.roll() < self.chance

    def note(self, outcome: GroupOutcome) -> None:
        """Learn what became of a prompt."""
        name = outcome.prompt.prompt_id
        self.answered[name] = self.answered.get(name, 0) + 1

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the log: data/select/NAME/answered."""
        return {"answered": float(len(self.answered))}


@dataclass(kw_only=True)
class NotTooLong(RolloutFilter):
    """Keeps rollouts of up to so many tokens, prompts included."""

    most: int = 1024

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        """Return for each sample whether it is kept."""
        counts = [
            sum(len(row.trajectory.tokens) for row in sample.rows) for sample in group.samples
        ]
        return [count <= self.most for count in counts]


@dataclass(kw_only=True)
class Hardest(ReplayOrder):
    """Replays the groups with the lowest mean reward."""

    def pick(self, groups: Sequence[UsedGroup], count: int, dice: Dice) -> Sequence[int]:
        """Return the positions of up to `count` groups."""
        del dice
        means = [used.group.samples[0].rows[0].group_mean for used in groups]
        return sorted(range(len(groups)), key=lambda index: means[index])[:count]


@dataclass(kw_only=True)
class NotTooOld(BatchGuard):
    """Refuses batches whose groups were sampled from versions that are far apart."""

    span: int = 2

    def unfit(self, groups: Sequence[FreshGroup]) -> Collection[int]:
        """Return the positions of the groups that are at fault."""
        newest = max(group.min_version for group in groups)
        return [i for i, group in enumerate(groups) if newest - group.min_version > self.span]
