"""Prompt selectors: which prompt is worth its rollouts now."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from astraflow.core.algorithms.points import Dice, GroupOutcome, PromptSelector
from astraflow.core.tasks import Prompt


@dataclass(slots=True, kw_only=True)
class UniformSelector(PromptSelector):
    """Admits everything."""


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
        del dice
        return self.rates.get(prompt.prompt_id, self.prior) < self.threshold

    def note(self, outcome: GroupOutcome) -> None:
        if not outcome.rewards:
            return
        passed = sum(reward > 0 for reward in outcome.rewards) / len(outcome.rewards)
        before = self.rates.get(outcome.prompt.prompt_id, self.prior)
        after = self.decay * before + (1 - self.decay) * passed
        self.rates[outcome.prompt.prompt_id] = after

    def metrics(self) -> Mapping[str, float]:
        solved = sum(rate >= self.threshold for rate in self.rates.values())
        return {"solved": float(solved), "known": float(len(self.rates))}


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
        return dice.roll() < self.chance(prompt.prompt_id)

    def note(self, outcome: GroupOutcome) -> None:
        """Move the rate of a prompt; the first group sets it."""
        if not outcome.rewards:
            return
        mean = outcome.mean_reward
        before = self.rates.get(outcome.prompt.prompt_id, mean)
        self.rates[outcome.prompt.prompt_id] = self.decay * before + (1 - self.decay) * mean

    def metrics(self) -> Mapping[str, float]:
        count = len(self.rates)
        return {"known": float(count), "mean_rate": sum(self.rates.values()) / max(1, count)}


_Streak = Literal["easy", "hard"]


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

    Attributes:
        p_easy_init: p of easy groups, at first.
        p_hard_init: p of hard groups, at first.
        alpha_easy: Share of easy groups that is aimed at.
        alpha_hard: Share of hard groups that is aimed at.
        delta_p: What p changes by with a version.
        p_min: Least p of either kind.
        p_max: Largest p of either kind.
        min_submit_easy: Least probability of a prompt with easy groups.
        min_submit_hard: Least probability of a prompt with hard groups.
        correct_threshold: Equal rewards above it are easy.
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
    streaks: dict[str, tuple[_Streak, int]] = field(
        default_factory=dict[str, tuple[_Streak, int]], init=False
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
        chance = self.chance(prompt.prompt_id)
        return chance >= 1 or dice.roll() < chance

    def note(self, outcome: GroupOutcome) -> None:
        if not outcome.rewards:
            return
        prompt_id = outcome.prompt.prompt_id
        self.seen["all"] = self.seen.get("all", 0) + 1
        if not outcome.is_flat:
            self.streaks.pop(prompt_id, None)
            return
        kind: _Streak = "easy" if outcome.mean_reward > self.correct_threshold else "hard"
        self.seen[kind] = self.seen.get(kind, 0) + 1
        before, streak = self.streaks.get(prompt_id, (kind, 0))
        self.streaks[prompt_id] = (kind, streak + 1 if kind == before else 1)

    def begin_version(self, version: int) -> None:
        del version
        total = self.seen.get("all", 0)
        if total:
            self.ratios = {kind: self.seen.get(kind, 0) / total for kind in ("easy", "hard")}
        if total and self.is_armed:
            self.p_easy = self._moved(self.p_easy, self.ratios["easy"] >= self.alpha_easy)
            self.p_hard = self._moved(self.p_hard, self.ratios["hard"] >= self.alpha_hard)
        self.seen.clear()

    def end_warm_up(self) -> None:
        self.is_armed = True

    def metrics(self) -> Mapping[str, float]:
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
