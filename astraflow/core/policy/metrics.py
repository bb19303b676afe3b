"""Metrics: of a batch, by the names that dashboards know, and of the last ones."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from astraflow.core.rollouts import Outcome
from astraflow.core.samples import FreshGroup


def batch_metrics(groups: Sequence[FreshGroup], *, train_version: int) -> dict[str, float]:
    """Return what the rows of a batch say.

    Args:
        groups: Of the batch, at least one sample each.
        train_version: What the batch trains on; lag is counted from it.
    """
    samples = [sample for group in groups for sample in group.samples]
    rows = [row for sample in samples for row in sample.rows]
    lags = np.array([train_version - sample.min_version for sample in samples])
    rewards = np.array([row.reward for row in rows])
    sampled = np.array([row.trajectory.sampled_count for row in rows])
    stds = np.array(
        [max(row.group_std for sample in group.samples for row in sample.rows) for group in groups]
    )
    # Each rollout counts once.
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in {id(row.rollout): row.rollout for row in rows}.values():
        for name, value in rollout.reward_parts.items():
            parts[name].append(value)
    truncated = [sample.entry.rollout.outcome is Outcome.TRUNCATED for sample in samples]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "advantage/abs_mean": float(np.mean([abs(row.advantage) for row in rows])),
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        "group/zero_std_frac": float((stds == 0).mean()),
        "response/length/mean": float(sampled.mean()),
        "response/truncated_frac": float(np.mean(truncated)),
        "batch/groups": float(len(groups)),
        "batch/rollouts": float(len(samples)),
        "batch/rows": float(len(rows)),
        "batch/sampled_tokens": float(sampled.sum()),
    } | {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}


def time_metrics(token_count: int, *, wait_s: float, train_s: float) -> dict[str, float]:
    seconds = wait_s + train_s
    return {
        "time/wait_batch_frac": wait_s / seconds if seconds > 0 else 0.0,
        "time/wait_s": wait_s,
        "time/train_s": train_s,
        "perf/tokens_per_s": token_count / seconds if seconds > 0 else 0.0,
    }


_BATCH_COUNT = 20

_REWARD_COUNT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedBatch:
    """One batch that was trained on."""

    time: datetime
    wait_s: float
    train_s: float
    token_count: int
    staleness_counts: Mapping[int, int]


class Window:
    """The last batches and rewards of a policy.

    Attributes:
        rewards: Of the last rollouts.
    """

    def __init__(self) -> None:
        self._batches = deque[ConsumedBatch](maxlen=_BATCH_COUNT)
        self.rewards = deque[float](maxlen=_REWARD_COUNT)
        self._since: datetime | None = None

    def begin(self, now: datetime) -> None:
        """Note when the first batch was leased."""
        self._since = self._since or now

    def add(self, batch: ConsumedBatch) -> None:
        if len(self._batches) == _BATCH_COUNT:
            self._since = self._batches[0].time
        self._batches.append(batch)

    @property
    def mean_reward(self) -> float | None:
        """Over the last rollouts; None: there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def wait_fraction(self) -> float:
        """Share of the time that the trainer waited for a batch, 0 to 1."""
        waited = sum(batch.wait_s for batch in self._batches)
        trained = sum(batch.train_s for batch in self._batches)
        return waited / (waited + trained) if waited + trained > 0 else 0.0

    @property
    def cadence_s(self) -> float | None:
        """Seconds per batch, waiting included; None: no batch was trained on yet."""
        if not self._batches:
            return None
        return sum(batch.wait_s + batch.train_s for batch in self._batches) / len(self._batches)

    @property
    def staleness_counts(self) -> dict[int, int]:
        total = Counter[int]()
        for batch in self._batches:
            total.update(batch.staleness_counts)
        return dict(sorted(total.items()))

    @property
    def span(self) -> timedelta:
        if not self._batches or self._since is None:
            return timedelta()
        return self._batches[-1].time - self._since

    @property
    def tokens_per_s(self) -> float:
        seconds = self.span.total_seconds()
        return sum(batch.token_count for batch in self._batches) / seconds if seconds > 0 else 0.0
