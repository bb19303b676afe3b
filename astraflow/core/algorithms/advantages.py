"""Advantages: how much better a row did than what it is compared with."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.samples import Row, rows_by_agent
from astraflow.core.settings import AdvantageSettings, Baseline, OverlongSettings

_EPSILON = 1e-6


def advantages_of(rewards: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """Return rewards minus their baseline, over their deviation where asked for.

    The mean of the group: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), which divides by
    the standard deviation; Dr. GRPO (arXiv 2503.20783) does not. The mean of the others: RLOO
    (arXiv 2402.14740). A group of equal rewards gets zeros either way. A row that is alone has no
    others: its baseline is 0.

    Args:
        rewards: f64[n], one per row of the group.
        settings: A deviation has 1e-6 added; that of a row alone is 1.

    Example:
        >>> rewards = np.array([1.0, 0.0, 0.0, 1.0])
        >>> advantages_of(rewards, AdvantageSettings()).tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    if settings.estimator is not None:
        return estimator_of(settings.estimator)(rewards)
    centred = rewards - _baseline(rewards, settings.baseline)
    if not settings.scale_by_std or len(rewards) == 1:
        return centred
    std = _std(rewards, _mean(rewards), ddof=0 if settings.is_population_std else 1)
    return centred / (std + _EPSILON)


@cache
def estimator_of(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return an estimator of the user's: f64[n], the advantage of each of n rewards, f64[n].

    Args:
        name: `module:function`.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is no such function here; INVALID_FIELD, at every
            call, when it does not return one finite number per reward.
    """
    own: Callable[[np.ndarray], Any] = load(name, what=f"advantages.estimator {name}")

    def checked(rewards: np.ndarray) -> np.ndarray:
        try:
            found = np.asarray(own(rewards.copy()), np.float64)
        except (TypeError, ValueError) as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"advantages.estimator {name} failed: {error}"
            ) from error
        if found.shape != rewards.shape or not np.isfinite(found).all():
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"advantages.estimator {name} returned {found.tolist()} for rewards of shape "
                f"{rewards.shape}, not one finite advantage for each",
            )
        return found

    return checked


def overlong_penalty(token_count: int, settings: OverlongSettings) -> float:
    """Return what is taken off a reward: DAPO's soft overlong punishment (arXiv 2503.14476).

    Example:
        >>> settings = OverlongSettings(max_tokens=100, buffer_tokens=20)
        >>> [overlong_penalty(count, settings) for count in (80, 90, 100, 500)]
        [0.0, 0.5, 1.0, 1.0]
    """
    over = token_count - (settings.max_tokens - settings.buffer_tokens)
    return settings.penalty * min(max(over / settings.buffer_tokens, 0.0), 1.0)


def stamp(rows: Sequence[Row], settings: AdvantageSettings) -> None:
    """Give the rewarded rows of a group their advantage, and the group's mean and deviation.

    Rows are compared with those of the same agent. Mean and deviation are those of the rewards as
    they came; length costs advantages only. Rows that are masked are compared with, and have none.

    Example: two samples whose first attempts got 1 and 0, and a second attempt, of the sample that
        failed, that got 1: advantages 0.5 and -0.5 of the first ones, 0 of the second.
    """
    for agent, same in rows_by_agent(rows).items():
        own = settings.agents.get(agent, settings)
        rewards = np.array([row.reward for row in same], np.float64)
        mean = float(_mean(rewards))
        std = float(_std(rewards, mean))
        if own.overlong is not None:
            counts = [row.trajectory.sampled_count for row in same]
            rewards -= [overlong_penalty(count, own.overlong) for count in counts]
        for row, advantage in zip(same, advantages_of(rewards, own).tolist(), strict=True):
            row.advantage = 0.0 if row.is_masked else advantage
            row.group_mean = mean
            row.group_std = std


def _baseline(rewards: np.ndarray, baseline: Baseline) -> np.ndarray | float:
    match baseline:
        case Baseline.GROUP:
            return _mean(rewards)
        case Baseline.LEAVE_ONE_OUT:
            if len(rewards) == 1:
                return 0.0
            mean = _mean(rewards)
            return mean + (mean - rewards) / (len(rewards) - 1)
        case Baseline.NONE:
            return 0.0


# As numpy's methods to the bit, which check for a few microseconds what holds here; but of equal
# values that value itself, which a sum may round away from: three times 0.1 is not 0.3.
def _mean(values: np.ndarray) -> Any:
    known: list[float] = values.tolist()
    if known.count(known[0]) == len(known):
        return known[0]
    return np.add.reduce(values) / len(values)


def _std(values: np.ndarray, mean: float, *, ddof: int = 0) -> Any:
    centred = values - mean
    return np.sqrt(np.add.reduce(centred * centred) / (len(values) - ddof))
