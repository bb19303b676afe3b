"""Marks: the sums of a run at one time; the difference of two is the balance between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.pool_size import PolicyBalance


@dataclass(slots=True, kw_only=True)
class PolicyCounters:
    """Of one policy since the beginning; seconds and rollouts.

    Attributes:
        acked_s: Trained on what was consumed; what is trained on now is not in it.
        filtered: Dropped when their group was whole.
    """

    waited_s: float = 0.0
    trained_s: float = 0.0
    acked_s: float = 0.0
    produced: int = 0
    entered: int = 0
    consumed: int = 0
    stale: int = 0
    filtered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """All sums at one time.

    Attributes:
        token_count: Sampled in all accepted rollouts.
        rollout_count: These.
        eval_token_count: Of them, in rollouts of evaluations.
        eval_rollout_count: These.
    """

    time: datetime
    policies: Mapping[PolicyId, PolicyCounters]
    live_s: float
    busy_s: float
    token_count: int
    rollout_count: int
    accepted: Mapping[MemberId, int]
    eval_token_count: int = 0
    eval_rollout_count: int = 0

    @property
    def train_token_count(self) -> int:
        """Sampled in rollouts of training."""
        return self.token_count - self.eval_token_count

    @property
    def train_rollout_count(self) -> int:
        """These."""
        return self.rollout_count - self.eval_rollout_count


def cost_of(policy_id: PolicyId, first: CounterSnapshot, last: CounterSnapshot) -> float:
    """Return how many tokens are sampled for a rollout that filters keep; 0: none was kept.

    Rollouts of groups that are not whole yet do not count: a pool that stops or begins has more or
    fewer of them than it makes.
    """
    before, after = first.policies[policy_id], last.policies[policy_id]
    rollouts = last.train_rollout_count - first.train_rollout_count
    entered, filtered = after.entered - before.entered, after.filtered - before.filtered
    if not rollouts or not entered:
        return 0.0
    tokens = last.train_token_count - first.train_token_count
    return tokens / rollouts * (entered + filtered) / entered


def used_of(first: PolicyCounters, last: PolicyCounters) -> float:
    """Return the rollouts per second of training; 0: none were trained on, or taken back."""
    acked_s = last.acked_s - first.acked_s
    return max(0, last.consumed - first.consumed) / acked_s if acked_s > 0 else 0.0


def balance_of(policy_id: PolicyId, first: PolicyCounters, last: PolicyCounters) -> PolicyBalance:
    """Return what one policy did between two sums."""
    waited_s, trained_s = last.waited_s - first.waited_s, last.trained_s - first.trained_s
    seconds = waited_s + trained_s
    return PolicyBalance(
        policy_id=policy_id,
        wait_fraction=waited_s / seconds if seconds > 0 else 0.0,
        produced_count=last.produced - first.produced,
        entered_count=last.entered - first.entered,
        consumed_count=last.consumed - first.consumed,
        stale_count=last.stale - first.stale,
    )
