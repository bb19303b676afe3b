"""Filter solved: prompts that the policy gets right nearly always are passed over."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import GroupOutcome, PromptSelector
from astraflow.core.tasks import Prompt


@dataclass(slots=True, kw_only=True)
class FilterSolved(PromptSelector):
    """Admits a prompt while the moving average of its pass rate is below a threshold.

    A rollout passes with a reward above 0. Example, with the defaults: a prompt that always
    passes has 0.1, 0.19, 0.271 ... after one, two, three groups, and is passed over after 29 of
    them, the first time that 1 - 0.9 ** n reaches 0.95.

    Attributes:
        threshold: Solved from here on.
        decay: What the average keeps of itself with each group.
        prior: Average of a prompt that was never asked.
    """

    threshold: float = 0.95
    decay: float = 0.9
    prior: float = 0.0
    rates: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or not 0 <= self.prior < self.threshold:
            raise ValueError("decay must be in [0, 1), and prior in [0, threshold)")

    def admits(self, prompt: Prompt, dice: Dice) -> bool:
        """Whether it is not solved yet."""
        del dice
        return self.rates.get(prompt.prompt_id, self.prior) < self.threshold

    def note(self, outcome: GroupOutcome) -> None:
        """Move the average of a prompt."""
        if not outcome.rewards:
            return
        passed = sum(reward > 0 for reward in outcome.rewards) / len(outcome.rewards)
        before = self.rates.get(outcome.prompt.prompt_id, self.prior)
        after = self.decay * before + (1 - self.decay) * passed
        self.rates[outcome.prompt.prompt_id] = after

    def metrics(self) -> Mapping[str, float]:
        """Return how many prompts are solved."""
        solved = sum(rate >= self.threshold for rate in self.rates.values())
        return {"solved": float(solved), "known": float(len(self.rates))}
