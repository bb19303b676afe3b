"""Balance: what the pool made, what trainers used and how long they waited, over a window.

Waits are integrals over time, exact between two events. The pool is looked at about 32 times per
window, so that an event costs the same in a pool of any size. Each time the sums so far are noted
as a snapshot of counters; two of them give the balance between.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Final, Self

from astraflow.core.autoscale import (
    FULL,
    MemberBalance,
    PolicyBalance,
    PoolBalance,
    ScaleAdvice,
    advise,
)
from astraflow.core.errors import Reason
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.capacity import Measured
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.pool.sessions import Sessions
from astraflow.core.settings import RunSettings
from astraflow.core.status import RolloutPlace
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.training import Training


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

    def since(self, before: Self) -> Self:
        """Return what came since an earlier time."""
        names = [each.name for each in fields(self)]
        return replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in names}
        )

    @property
    def use_per_s(self) -> float:
        """Rollouts per second of training; 0: none were trained on, or taken back."""
        return max(0, self.consumed) / self.acked_s if self.acked_s > 0 else 0.0

    def balance(self, policy_id: PolicyId) -> PolicyBalance:
        seconds = self.waited_s + self.trained_s
        return PolicyBalance(
            policy_id=policy_id,
            wait_fraction=self.waited_s / seconds if seconds > 0 else 0.0,
            produced_count=self.produced,
            entered_count=self.entered,
            consumed_count=self.consumed,
            stale_count=self.stale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """All sums at one time.

    Attributes:
        token_count: Sampled in all accepted rollouts.
        eval_token_count: Of them, in rollouts of evaluations.
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


def cost_of(policy_id: PolicyId, first: CounterSnapshot, last: CounterSnapshot) -> float:
    """Return how many tokens are sampled for a rollout that filters keep; 0: none was kept.

    Rollouts of groups that are not whole yet do not count: a pool that stops or begins has more or
    fewer of them than it makes.
    """
    done = last.policies[policy_id].since(first.policies[policy_id])
    rollouts = last.rollout_count - first.rollout_count
    rollouts -= last.eval_rollout_count - first.eval_rollout_count
    if not rollouts or not done.entered:
        return 0.0
    tokens = last.token_count - first.token_count
    tokens -= last.eval_token_count - first.eval_token_count
    return tokens / rollouts * (done.entered + done.filtered) / done.entered


_SNAPSHOTS: Final = 32

# A pool whose size moved by less than this share is the same pool.
_SAME: Final = 0.05

_WEIGHT: Final = 1 / 16

# Of one node, whatever it says: those of all nodes are added up in 32 bits.
_MOST_ACCELERATORS: Final = 1 << 20


@dataclass(slots=True, kw_only=True)
class _Wait:
    """What one policy's trainer does since the last event."""

    waits: bool = False
    trains: bool = False
    waited_s: float = 0.0
    trained_s: float = 0.0
    acked_s: float = 0.0
    batch_count: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Balance:
    """Measures a run, and says how large its pool should be.

    The pool is seen as integrals: accelerators times seconds, and the same of those that were busy.
    Usable is the share of the credit that is used when all of the pool is at work; the full rate is
    in tokens per second of one accelerator then.
    """

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    measured: Measured
    training: Training
    pacing: PolicyPacing
    lifecycle: RunLifecycle
    _snapshots: deque[CounterSnapshot] = field(init=False)
    _interval: timedelta = field(init=False)
    _waits: dict[PolicyId, _Wait] = field(init=False)
    _live_s: float = field(init=False, default=0.0)
    _busy_s: float = field(init=False, default=0.0)
    _usable: float = field(init=False, default=1.0)
    _full_token_rate: float = field(init=False, default=0.0)
    _time: datetime | None = field(init=False, default=None)
    _sizes: tuple[int, int] = field(init=False, default=(0, 0))
    _change_time: datetime | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._snapshots = deque(maxlen=_SNAPSHOTS + 2)
        self._interval = self.settings.scale.window / _SNAPSHOTS
        self._waits = {policy_id: _Wait() for policy_id in self.policies}

    @property
    def time(self) -> datetime | None:
        """Of the last event; None: there was none."""
        return self._time

    def advance(self, now: datetime) -> None:
        """Count the time since the last event, and look at the pool when it is due."""
        if self._time is not None:
            seconds = (now - self._time).total_seconds()
            for wait in self._waits.values():
                wait.waited_s += seconds * wait.waits
                wait.trained_s += seconds * wait.trains
        self._time = now
        for policy_id, policy in self.policies.items():
            wait, leases = self._waits[policy_id], policy.lease_table
            is_there = leases.streams and policy.end is None and not self.lifecycle.is_paused
            wait.trains = bool(is_there and leases.leases)
            # For the pool, not for another policy.
            is_idle = is_there and not leases.leases
            wait.waits = bool(is_idle) and self.pacing.blocker_of(policy) is None
            batch_count = policy.progress.consumed_count
            if batch_count != wait.batch_count:
                wait.batch_count, wait.acked_s = batch_count, wait.trained_s
        if not self._snapshots or now - self._snapshots[-1].time >= self._interval:
            self._sample_pool(now)

    def begin_again(self, now: datetime) -> None:
        """Measure anew: nobody could wait for a hub that was down."""
        self._snapshots.clear()
        self._time = now
        self._change_time = now

    def advice(self, now: datetime, window: timedelta | None = None) -> ScaleAdvice:
        """Return how large the pool should be; changes nothing.

        Args:
            now: The time.
            window: To look back over, at most that of the settings; None: that one.
        """
        settings = self.settings.scale
        wanted = settings.window if window is None else min(window, settings.window)
        last = self._snapshot(now)
        start, middle = self._at(now - wanted), self._at(now - wanted / 2)
        cost = {policy_id: cost_of(policy_id, start, last) for policy_id in self.policies}
        changed = self._change_time
        if _moved(self._sizes, (self._present(), self._sizes[1])):
            changed = now
        ready = None if changed is None else changed + settings.cooldown + wanted
        first = self._snapshots[0] if self._snapshots else last
        # Snapshots are so far apart.
        if last.time - first.time < wanted - 2 * self._interval:
            ready = max(ready or now, first.time + wanted)
        return advise(
            settings,
            (self._between(start, middle, cost), self._between(middle, last, cost)),
            self._between(start, last, cost),
            self._members(start),
            now=now,
            ready_time=ready or now,
        )

    def _sample_pool(self, now: datetime) -> None:
        """Take the pool as it is for the time since the last look."""
        before = self._snapshots[-1] if self._snapshots else None
        policy_ids, sessions = self.settings.workflow.policy_ids, self.sessions
        live = [
            member
            for member in sessions.pool.values()
            if member.is_ready(policy_ids)
            and not member.is_draining
            and not sessions.is_silent(member, now)
        ]
        count = sum(map(accelerators, live))
        sizes = self._present(), count
        if _moved(self._sizes, sizes):
            self._sizes, self._change_time = sizes, now
        if before is not None:
            seconds = (now - before.time).total_seconds()
            self._live_s += seconds * count
            self._busy_s += seconds * count * self._busy(live)
        self._snapshots.append(self._snapshot(now))
        if len(self._snapshots) > _SNAPSHOTS // 2:
            self._note_full(self._snapshots[-1 - _SNAPSHOTS // 2], self._snapshots[-1])

    def _present(self) -> int:
        """Return the accelerators of all nodes but those that drain."""
        pool = self.sessions.pool.values()
        return sum(accelerators(member) for member in pool if not member.is_draining)

    def _busy(self, live: list[LiveRaas]) -> float:
        """Return which share of what the pool can do it is asked for."""
        used = sum(min(member.outstanding, member.max_outstanding) for member in live)
        share = used / max(1, sum(member.max_outstanding for member in live))
        if self.training.needs_capacity:
            self._usable += _WEIGHT * (share - self._usable)
            return 1.0
        return min(1.0, share / max(self._usable, 1e-3))

    def _note_full(self, first: CounterSnapshot, last: CounterSnapshot) -> None:
        """Measure what one accelerator does while all are at work, and nobody is new."""
        if self._change_time is None or self._change_time > first.time:
            return
        live_s, busy_s = last.live_s - first.live_s, last.busy_s - first.busy_s
        if live_s > 0 and busy_s >= FULL * live_s:
            rate = (last.token_count - first.token_count) / live_s
            known = self._full_token_rate
            self._full_token_rate = known + _WEIGHT * (rate - known) if known else rate

    def _snapshot(self, now: datetime) -> CounterSnapshot:
        members, measured = self.sessions.pool.values(), self.measured
        return CounterSnapshot(
            time=now,
            policies={policy_id: self._sums(p) for policy_id, p in self.policies.items()},
            live_s=self._live_s,
            busy_s=self._busy_s,
            token_count=measured.token_count,
            rollout_count=measured.rollout_count,
            eval_token_count=measured.eval_token_count,
            eval_rollout_count=measured.eval_rollout_count,
            accepted={member.member_id: member.accepted_count for member in members},
        )

    def _sums(self, policy: PolicyState) -> PolicyCounters:
        wait, dropped = self._waits[policy.policy_id], policy.samples.books.drops_by_reason
        return PolicyCounters(
            waited_s=wait.waited_s,
            trained_s=wait.trained_s,
            acked_s=wait.acked_s,
            produced=policy.samples.produced_count,
            entered=policy.samples.entered_count,
            consumed=policy.samples.books.count(RolloutPlace.TRAINED),
            stale=dropped[Reason.STALE],
            filtered=dropped[Reason.FILTERED] + dropped[Reason.GROUP_INCOMPLETE],
        )

    def _at(self, time: datetime) -> CounterSnapshot:
        """Return the first snapshot that is not before a time; the last one if all are."""
        for snapshot in self._snapshots:
            if snapshot.time >= time:
                return snapshot
        return self._snapshots[-1] if self._snapshots else self._snapshot(time)

    def _between(
        self, first: CounterSnapshot, last: CounterSnapshot, cost: Mapping[PolicyId, float]
    ) -> PoolBalance:
        """Return the balance between two snapshots, by what a rollout to be trained on costs."""
        seconds = (last.time - first.time).total_seconds()
        seen_s = last.live_s - first.live_s
        looked_at = self._snapshots[-1].time if self._snapshots else last.time
        looked = max(1e-9, (looked_at - first.time).total_seconds())
        live = seen_s / min(seconds, looked) if seconds > 0 else 0.0
        done = {
            policy_id: last.policies[policy_id].since(first.policies[policy_id])
            for policy_id, policy in self.policies.items()
            if policy.end is None
        }
        # What training would use without a wait, and what evaluations did use.
        used_token_rate = max((each.use_per_s * cost[p] for p, each in done.items()), default=0.0)
        if used_token_rate:
            evals = last.eval_token_count - first.eval_token_count
            used_token_rate = used_token_rate + evals / seconds if seconds > 0 else 0.0
        return PoolBalance(
            span=last.time - first.time,
            accelerator_count=live,
            busy_fraction=(last.busy_s - first.busy_s) / seen_s if seen_s > 0 else 1.0,
            token_rate=(last.token_count - first.token_count) / seconds if seconds > 0 else 0.0,
            full_token_rate=self._full_token_rate,
            used_token_rate=used_token_rate,
            policies=tuple(each.balance(policy_id) for policy_id, each in done.items()),
        )

    def _members(self, start: CounterSnapshot) -> tuple[MemberBalance, ...]:
        def produced(member: LiveRaas) -> int:
            # A session that was opened since counts from nothing, whoever had that id before.
            is_older = member.join_time <= start.time
            before = start.accepted.get(member.member_id, 0) if is_older else 0
            return member.accepted_count - before

        return tuple(
            MemberBalance(
                member_id=member.member_id,
                name=member.name,
                accelerator_count=accelerators(member),
                produced_count=produced(member),
                tokens_per_s=member.speed.tokens_per_s,
                price_per_hour=member.resources.price_per_hour,
                inflight_count=member.outstanding,
                is_live=bool(member.live),
            )
            for member in self.sessions.pool.values()
            if not member.is_draining
        )


def _moved(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether the pool is another one."""
    pairs = zip(before, after, strict=True)
    return any(abs(new - old) >= max(1.0, _SAME * old) for old, new in pairs)


def accelerators(member: LiveRaas) -> int:
    """Return how many accelerators a RaaS counts for; one without any counts as 1."""
    return min(max(1, member.resources.accelerator_count), _MOST_ACCELERATORS)
