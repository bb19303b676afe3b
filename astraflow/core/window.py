"""Windows: how training went lately, within a bound."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

_BATCH_COUNT = 20
_REWARD_COUNT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One batch that was trained on."""

    time: datetime
    wait_s: float
    train_s: float
    token_count: int
    staleness_counts: Mapping[int, int]


class Window:
    """The last batches and rewards of a policy."""

    def __init__(self) -> None:
        self._batches = deque[Consumed](maxlen=_BATCH_COUNT)
        self._rewards = deque[float](maxlen=_REWARD_COUNT)
        self._since: datetime | None = None

    def begin(self, now: datetime) -> None:
        """Note when the first batch was leased."""
        self._since = self._since or now

    def add(self, batch: Consumed) -> None:
        """Note a batch."""
        if len(self._batches) == _BATCH_COUNT:
            self._since = self._batches[0].time
        self._batches.append(batch)

    def add_reward(self, reward: float) -> None:
        """Note the reward of an accepted rollout."""
        self._rewards.append(reward)

    @property
    def mean_reward(self) -> float | None:
        """Over the last rollouts; None: there is none."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

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
        """Rollouts trained on, by staleness in versions."""
        total = Counter[int]()
        for batch in self._batches:
            total.update(batch.staleness_counts)
        return dict(sorted(total.items()))

    @property
    def newest_staleness_counts(self) -> Mapping[int, int]:
        """The same of the last batch."""
        return self._batches[-1].staleness_counts if self._batches else {}

    @property
    def span(self) -> timedelta:
        """Time that the batches of the window took."""
        if not self._batches or self._since is None:
            return timedelta()
        return self._batches[-1].time - self._since

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that were trained on."""
        seconds = self.span.total_seconds()
        return sum(batch.token_count for batch in self._batches) / seconds if seconds > 0 else 0.0
