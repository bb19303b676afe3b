"""Curriculum: prompts that are neither too hard nor too easy now are asked for most."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import GroupOutcome, PromptSelector
from astraflow.core.tasks import Prompt


@dataclass(slots=True, kw_only=True)
class Curriculum(PromptSelector):
    """Admits prompts by how far their measured pass rate is from a target.

    The rate r of a prompt is a moving average of its groups' mean rewards, which should lie in
    [0, 1]. It is admitted with probability max(floor, 1 - |r - target| / width), and always while
    it was never asked. Example, with the defaults: at r = 0.5 with 1, at 0.75 with 0.5, at 1 with
    the floor of 0.1, so that nothing is lost sight of.

    Attributes:
        target: Pass rate that is asked for most.
        width: Distance from the target at which only the floor is left.
        floor: Least probability.
        decay: What the average keeps of itself with each group.
    """

    target: float = 0.5
    width: float = 0.5
    floor: float = 0.1
    decay: float = 0.5
    rates: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def __post_init__(self) -> None:
        if self.width <= 0 or not 0 <= self.floor <= 1 or not 0 <= self.decay < 1:
            raise ValueError("width must be above 0, floor in [0, 1], decay in [0, 1)")

    def chance(self, prompt_id: str) -> float:
        """Return the probability with which a prompt is admitted."""
        rate = self.rates.get(prompt_id)
        if rate is None:
            return 1.0
        return max(self.floor, 1 - abs(rate - self.target) / self.width)

    def admits(self, prompt: Prompt, dice: Dice) -> bool:
        """Whether the dice fall below its chance."""
        return dice.roll() < self.chance(prompt.prompt_id)

    def note(self, outcome: GroupOutcome) -> None:
        """Move the rate of a prompt; the first group sets it."""
        if not outcome.rewards:
            return
        mean = outcome.mean_reward
        before = self.rates.get(outcome.prompt.prompt_id, mean)
        self.rates[outcome.prompt.prompt_id] = self.decay * before + (1 - self.decay) * mean

    def metrics(self) -> Mapping[str, float]:
        """Return the mean rate over the prompts that were asked."""
        count = len(self.rates)
        return {"known": float(count), "mean_rate": sum(self.rates.values()) / max(1, count)}
