"""Rollouts of simulated nodes: of a length, with the versions that sampled them, and no content."""

from functools import lru_cache
from math import exp, log
from random import Random

import numpy as np

from astraflow.core.ids import PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import FinishReason, Outcome, Rollout, Trajectory, VersionSpan
from astraflow.core.tasks import RolloutTask

POLICY = PolicyId("policy")
# Tokens that one simulated token stands for: nobody reads them.
GRAIN = 100


class Lengths:
    """Draws how long rollouts are."""

    def __init__(self, *, mean: float, spread: float, seed: int) -> None:
        """Draw from a log-normal distribution.

        Args:
            mean: Tokens.
            spread: Standard deviation of the logarithm.
            seed: Of the draws.
        """
        self._random = Random(seed)  # noqa: S311 - a simulation, not a secret
        self._mu = log(mean) - spread**2 / 2
        self._spread = spread

    def draw(self) -> float:
        """Return the tokens of one rollout, at least one."""
        return max(1.0, exp(self._random.gauss(self._mu, self._spread)))


def make_rollout(
    task: RolloutTask, index: int, *, tokens: float, first_version: int, last_version: int
) -> Rollout:
    """Return a scored rollout.

    Args:
        task: That it answers.
        index: Which sample.
        tokens: How long it is.
        first_version: That sampled its beginning.
        last_version: That sampled its end.
    """
    name = f"{task.task_id}/{index}"
    count = max(2, round(tokens / GRAIN))
    ids, mask, logprobs = _columns(count)
    trajectory = Trajectory(
        trajectory_id=TrajectoryId(name),
        policy_id=POLICY,
        tokens=ids,
        sampled_mask=mask,
        logprobs=logprobs,
        version_spans=_spans(count, first_version, last_version),
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=RolloutId(name),
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=index,
        outcome=Outcome.SCORED,
        reward=float(index % 2),
        trajectories=(trajectory,),
    )


def _spans(count: int, first: int, last: int) -> tuple[VersionSpan, ...]:
    if first == last:
        return (VersionSpan(version=first, length=count),)
    half = count // 2
    return (
        VersionSpan(version=first, length=half),
        VersionSpan(version=last, length=count - half),
    )


@lru_cache(maxsize=4096)
def _columns(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens i32[n + 1], mask bool[n + 1] and log-probabilities f32[n + 1]."""
    mask = np.ones(count + 1, bool)
    mask[0] = False
    return np.zeros(count + 1, np.int32), mask, np.zeros(count + 1, np.float32)
