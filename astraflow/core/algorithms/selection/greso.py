"""GRESO: prompts whose groups taught nothing, several times in a row, are passed over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.algorithms.points import GroupOutcome, PromptSelector
from astraflow.core.tasks import Prompt

Kind = Literal["easy", "hard"]


@dataclass(slots=True, kw_only=True)
class Greso(PromptSelector):
    """Admits a prompt by how often in a row all its rewards were equal (arXiv 2506.02177).

    A group of equal rewards is easy above `correct_threshold`, else hard. A prompt with a streak
    of z such groups of one kind is admitted with probability max(p_kind ** z, min_submit_kind);
    a group of unequal rewards ends the streak. With each version p_kind falls by `delta_p` where
    at least a share `alpha_kind` of the groups since the last one was of that kind, and rises
    otherwise; this begins once as many prompts as there are rows came up since version 1.

    Example, with the defaults: after one hard group 0.5, after two max(0.25, 0.4) = 0.4; an easy
    group then makes the streak 1 again, with 0.5, and three more of them max(0.0625, 0.1) = 0.1.
    """

    p_easy_init: float = 0.5
    p_hard_init: float = 0.5
    alpha_easy: float = 0.083
    alpha_hard: float = 0.167
    delta_p: float = 0.01
    p_min: float = 0.01
    p_max: float = 0.99
    min_submit_easy: float = 0.10
    min_submit_hard: float = 0.40
    correct_threshold: float = 0.5
    p_easy: float = field(default=0.0, init=False)
    p_hard: float = field(default=0.0, init=False)
    is_armed: bool = field(default=False, init=False)
    streaks: dict[str, tuple[Kind, int]] = field(
        default_factory=dict[str, tuple[Kind, int]], init=False
    )
    seen: dict[str, int] = field(default_factory=dict[str, int], init=False)
    ratios: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def __post_init__(self) -> None:
        self.p_easy, self.p_hard = self.p_easy_init, self.p_hard_init
        if not 0 < self.p_min <= min(self.p_easy, self.p_hard):
            raise ValueError("p_min must be above 0 and at most p_easy_init and p_hard_init")
        if not max(self.p_easy, self.p_hard) <= self.p_max <= 1:
            raise ValueError("p_max must be at most 1 and at least p_easy_init and p_hard_init")

    def chance(self, prompt_id: str) -> float:
        """Return the probability with which a prompt is admitted."""
        kind, streak = self.streaks.get(prompt_id, ("easy", 0))
        if not streak:
            return 1.0
        if kind == "easy":
            return max(self.p_easy**streak, self.min_submit_easy)
        return max(self.p_hard**streak, self.min_submit_hard)

    def admits(self, prompt: Prompt, dice: Dice) -> bool:
        """Whether it has no streak, or the dice are with it."""
        chance = self.chance(prompt.prompt_id)
        return chance >= 1 or dice.roll() < chance

    def note(self, outcome: GroupOutcome) -> None:
        """Lengthen or end the streak of a prompt."""
        if not outcome.rewards:
            return
        prompt_id = outcome.prompt.prompt_id
        self.seen["all"] = self.seen.get("all", 0) + 1
        if not outcome.is_flat:
            self.streaks.pop(prompt_id, None)
            return
        kind: Kind = "easy" if outcome.mean_reward > self.correct_threshold else "hard"
        self.seen[kind] = self.seen.get(kind, 0) + 1
        before, streak = self.streaks.get(prompt_id, (kind, 0))
        self.streaks[prompt_id] = (kind, streak + 1 if kind == before else 1)

    def begin_version(self, version: int) -> None:
        """Move both probabilities by what was seen since the last version."""
        del version
        total = self.seen.get("all", 0)
        if total:
            self.ratios = {kind: self.seen.get(kind, 0) / total for kind in ("easy", "hard")}
        if total and self.is_armed:
            self.p_easy = self._moved(self.p_easy, self.ratios["easy"] >= self.alpha_easy)
            self.p_hard = self._moved(self.p_hard, self.ratios["hard"] >= self.alpha_hard)
        self.seen.clear()

    def end_warm_up(self) -> None:
        """Let probabilities move from now on."""
        self.is_armed = True

    def metrics(self) -> Mapping[str, float]:
        """Return the probabilities and what was seen before the newest version."""
        return {
            "p_easy": self.p_easy,
            "p_hard": self.p_hard,
            "observed_easy_ratio": self.ratios.get("easy", 0.0),
            "observed_hard_ratio": self.ratios.get("hard", 0.0),
            "adjustment_armed": float(self.is_armed),
        }

    def _moved(self, chance: float, is_common: bool) -> float:
        moved = chance - self.delta_p if is_common else chance + self.delta_p
        return min(self.p_max, max(self.p_min, moved))
