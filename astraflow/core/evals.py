"""Evaluations: pinned versions measured on data sets, from rewards to avg@k and pass@k."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from math import comb

from astraflow.core.errors import Failure
from astraflow.core.ids import EvalRunId, PolicyId, WorkflowId


class EvalState(StrEnum):
    """Where an evaluation stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (EvalState.SUCCEEDED, EvalState.FAILED, EvalState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The outcome on one data set; see `evals/v1/eval.proto`.

    A missing rollout counts nowhere but in `missing_count`. `data_set` is empty in the
    mean over data sets.
    """

    data_set: str
    prompt_count: int
    repeats: int
    avg_at_k: float
    pass_at_k: Mapping[int, float] = field(default_factory=dict[int, float])
    mean_reward: float
    missing_count: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRun:
    """One evaluation of pinned versions on one suite; see `evals/v1/eval.proto`.

    `failure` of one that is not final is what it waits for, and will fail of in a while.
    """

    eval_run_id: EvalRunId
    suite: str
    versions: Mapping[PolicyId, int]
    state: EvalState
    rollout_count: int
    scored_count: int = 0
    missing_count: int = 0
    results: tuple[EvalResult, ...] = ()
    overall: EvalResult | None = None
    failure: Failure | None = None
    create_time: datetime
    finish_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDataSet:
    """One part of a suite; a rollout is correct when its reward is at least `correct_reward`."""

    data_set: str
    workflow_id: WorkflowId
    prompt_count: int
    repeats: int
    correct_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSuiteInfo:
    """A named set of data sets from the recipe, and the policies whose versions it pins."""

    suite: str
    data_sets: tuple[EvalDataSet, ...]
    policy_ids: tuple[PolicyId, ...]


def pass_at_k(*, scored: int, correct: int, k: int) -> float:
    """Return the unbiased chance that one of k samples is correct (Chen et al. 2021, eq. 1).

    Example:
        Of 4 samples 1 is correct: pass@1 is 0.25, pass@2 is 1 - C(3, 2) / C(4, 2) = 0.5.
    """
    if scored - correct < k:
        return 1.0
    return 1.0 - comb(scored - correct, k) / comb(scored, k)


@dataclass(slots=True, eq=False)
class EvalAccumulator:
    """What is known so far of one data set.

    Attributes:
        settings: Of the data set in the suite.
        prompt_count: Rows of the data set.
        prompts: (scored, correct) of each finished prompt.
    """

    settings: EvalDataSet
    prompt_count: int
    prompts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    scored_count: int = 0
    missing_count: int = 0
    _reward_sum: float = 0.0
    _metric_sums: dict[str, float] = field(default_factory=dict[str, float])
    _metric_counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, reward: float, metrics: Mapping[str, float]) -> None:
        self.scored_count += 1
        self._reward_sum += reward
        for name, value in metrics.items():
            # An older release, of whose snapshot this may be, counted all rollouts for each name.
            before = self.scored_count - 1 if name in self._metric_sums else 0
            self._metric_counts[name] = self._metric_counts.get(name, before) + 1
            self._metric_sums[name] = self._metric_sums.get(name, 0.0) + value

    def close(self, rewards: Sequence[float]) -> None:
        """Count one finished prompt by the rewards of its rollouts."""
        correct = sum(reward >= self.settings.correct_reward for reward in rewards)
        if rewards:
            self.prompts.append((len(rewards), correct))

    def result(self) -> EvalResult:
        return EvalResult(
            data_set=self.settings.data_set,
            prompt_count=self.prompt_count,
            repeats=self.settings.repeats,
            avg_at_k=_mean([correct / scored for scored, correct in self.prompts]),
            pass_at_k={
                k: _mean([pass_at_k(scored=n, correct=c, k=k) for n, c in self.prompts if n >= k])
                for k in _powers(self.settings.repeats)
            },
            mean_reward=self._reward_sum / max(1, self.scored_count),
            missing_count=self.missing_count,
            metrics={
                name: total / self._metric_counts.get(name, self.scored_count)
                for name, total in sorted(self._metric_sums.items())
            },
        )


def overall(results: Sequence[EvalResult]) -> EvalResult | None:
    """Return the mean over data sets, each counted alike; None: there is none."""
    if not results:
        return None
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    passes: defaultdict[int, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            metrics[name].append(value)
        for k, value in result.pass_at_k.items():
            passes[k].append(value)
    return EvalResult(
        data_set="",
        prompt_count=sum(result.prompt_count for result in results),
        repeats=max(result.repeats for result in results),
        avg_at_k=_mean([result.avg_at_k for result in results]),
        pass_at_k={k: _mean(values) for k, values in sorted(passes.items())},
        mean_reward=_mean([result.mean_reward for result in results]),
        missing_count=sum(result.missing_count for result in results),
        metrics={name: _mean(values) for name, values in sorted(metrics.items())},
    )


def _powers(repeats: int) -> list[int]:
    """1, 2, 4 ... up to repeats, and repeats itself."""
    powers = {1 << bit for bit in range(repeats.bit_length())} | {repeats}
    return sorted(k for k in powers if 1 <= k <= repeats)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
