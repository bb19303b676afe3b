"""Auto-scaling: how large the pool should be, by a window; which nodes come and go; when.

A dead band on the share of time w that trainers waited, after the controller that AstraFlow
published: above 0.10 the pool grows to G / (1 - w), below 0.05 it shrinks to what is consumed plus
a tenth, between the two it stays. Here admission holds production back to what is consumed, so
both ways only the busy part of the pool counts: what it *could* produce is what it did produce,
divided by how busy it was.

Once it was seen what an accelerator makes when all are at work, the size follows from what is used
instead: tokens per second of training, over tokens per second of an accelerator. The dead band then
says when to change, and this how far. A full pool that is too small by it grows within the band.

Example:
    4 accelerators, trainers waited 0.6 of the window: 4 / (1 - 0.6) = 10. With 10 that were busy
    0.4 of the time and no wait: 10 * 0.4 * 1.1 = 4.4, so 5. A batch of 64,000 tokens takes 20 s of
    training, an accelerator makes 400 tokens/s: 8, whatever was waited for with fewer; with 9 it
    stays, for 8 and a tenth are 9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil, inf
from typing import Final

from astraflow.core.ids import MemberId, PolicyId

WAIT_HIGH: Final = 0.10

WAIT_LOW: Final = 0.05

WAIT_CAP: Final = 0.95

SHRINK_PAD: Final = 1.10

# A pool that is less busy than this has something to spare.
FULL: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBalance:
    """One policy over a window, in rollouts.

    Attributes:
        wait_fraction: Share of the time that its trainer waited for a batch, 0 to 1.
        produced_count: Accepted for it.
        entered_count: Kept after filters.
        consumed_count: Trained on, less what was rolled back.
        stale_count: Dropped as stale.
    """

    policy_id: PolicyId
    wait_fraction: float = 0.0
    produced_count: int = 0
    entered_count: int = 0
    consumed_count: int = 0
    stale_count: int = 0

    @property
    def use(self) -> float | None:
        """Share of what entered that was needed; None: nothing entered, or nothing was used.

        More may be taken back by a rollback than was trained on.
        """
        if not self.entered_count or self.consumed_count <= 0:
            return None
        return self.consumed_count / self.entered_count


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBalance:
    """The pool and its trainers over a window.

    Attributes:
        span: How long it was.
        accelerator_count: Live ones, a mean over the window.
        busy_fraction: Share of what the pool could do that it was asked for, 0 to 1.
        token_rate: Sampled tokens per second of all.
        full_token_rate: Of one accelerator when all were busy; 0: they never were.
        used_token_rate: What trainers would use if they never waited; 0: too little is known.
        policies: Each by itself.
    """

    span: timedelta
    accelerator_count: float
    busy_fraction: float
    token_rate: float = 0.0
    full_token_rate: float = 0.0
    used_token_rate: float = 0.0
    policies: tuple[PolicyBalance, ...] = ()

    @property
    def wait_fraction(self) -> float:
        """Of the policy that waits most."""
        return max((policy.wait_fraction for policy in self.policies), default=0.0)

    @property
    def right_count(self) -> float | None:
        """Accelerators that make what is used; None: too little is known."""
        if not self.full_token_rate or not self.used_token_rate:
            return None
        return self.used_token_rate / self.full_token_rate


def target_of(balance: PoolBalance, present: int) -> tuple[int, str]:
    """Return how many accelerators are wanted, and why."""
    finding = f"trainers waited {balance.wait_fraction:.0%} of {balance.span.total_seconds():g} s"
    if balance.wait_fraction > WAIT_HIGH or _is_short(balance, present):
        return _grown(balance, present, finding)
    need = _need(balance)
    if balance.wait_fraction < WAIT_LOW and need is not None:
        finding += f", and what was consumed keeps {need:.1f} accelerators busy"
        padded = max(1, _ceil(need * SHRINK_PAD))
        if padded < present and balance.right_count is not None:
            # It is known well: just that is left.
            padded = max(1, _ceil(need))
        return min(present, padded), finding
    return present, f"{finding}: enough, and not too much"


def _is_short(balance: PoolBalance, present: int) -> bool:
    """Whether a pool that is all at work is known to make too little, before much is waited for."""
    right = balance.right_count
    is_full = balance.wait_fraction > WAIT_LOW and balance.busy_fraction >= FULL
    return is_full and right is not None and _ceil(right) > present


def _grown(balance: PoolBalance, present: int, finding: str) -> tuple[int, str]:
    """Return what is enough, unless the pool has something to spare."""
    live = balance.accelerator_count
    busy = balance.busy_fraction if live > 0 else 1.0
    right = balance.right_count
    if right is None:
        right = live * busy / (1 - min(balance.wait_fraction, WAIT_CAP))
    grown = _ceil(right)
    if grown <= present and busy < FULL:
        return present, (
            f"{finding}, but the pool was {busy:.0%} busy: more nodes do not help; see what the "
            "trainer waits for, or raise max_staleness"
        )
    # Of no node nothing is known but that it is too few.
    return max(present, grown, 1), f"{finding}: {live:.1f} accelerators are too few"


def _need(balance: PoolBalance) -> float | None:
    """Return how many accelerators make what was consumed; None: too little is known.

    Two ways to know it; the larger counts. Engines that are half empty are more than half as fast
    as full ones, which the first one does not see.
    """
    uses = [policy.use for policy in balance.policies]
    known = [use for use in uses if use is not None]
    if not known or len(known) < len(uses):
        return None
    use = min(1.0, max(known))
    by_time = balance.accelerator_count * balance.busy_fraction * use
    if balance.right_count is not None:
        return max(by_time, balance.right_count)
    if not balance.full_token_rate:
        return by_time
    return max(by_time, balance.token_rate * use / balance.full_token_rate)


def _ceil(count: float) -> int:
    # A count that is whole but for rounding is whole.
    return ceil(count - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """Bounds of the pool, and how it is measured.

    Attributes:
        min_count: Nodes, at least.
        max_count: Nodes, at most.
        window: What is measured over, and the least time between two changes.
        cooldown: After a change of the pool nothing is measured for so long.
    """

    min_count: int = 1
    max_count: int = 64
    window: timedelta = timedelta(seconds=300)
    cooldown: timedelta = timedelta()


class ScaleAction(StrEnum):
    """Which way to go."""

    HOLD = "hold"
    GROW = "grow"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberBalance:
    """One node over a window.

    Attributes:
        accelerator_count: Of it; one without any counts as 1.
        produced_count: Rollouts that were accepted of it.
        tokens_per_s: Sampled, as measured; 0: not yet.
        price_per_hour: None: unknown.
        inflight_count: Samples that it holds.
        is_live: Whether it serves a version; False: it is joining.
    """

    member_id: MemberId
    name: str = ""
    accelerator_count: int = 1
    produced_count: int = 0
    tokens_per_s: float = 0.0
    price_per_hour: float | None = None
    inflight_count: int = 0
    is_live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAdvice:
    """How large the pool should be, and why; counts as in `control/v1/scale.proto`.

    Attributes:
        accelerator_count: Live or joining, without those that drain.
        balance: What it rests on.
        members: The nodes; who should go first comes first.
        cooldown_time: No change before; None: none holds it back.
    """

    action: ScaleAction
    accelerator_count: int
    target_accelerator_count: int
    member_count: int
    target_member_count: int
    balance: PoolBalance
    members: tuple[MemberBalance, ...] = ()
    retired: frozenset[MemberId] = frozenset()
    message: str = ""
    cooldown_time: datetime | None = None


def advise(
    settings: ScaleSettings,
    halves: Sequence[PoolBalance],
    whole: PoolBalance,
    members: Sequence[MemberBalance],
    *,
    now: datetime,
    ready_time: datetime | None,
) -> ScaleAdvice:
    """Return what to do with the pool.

    It grows when the whole window says so, by what its later half says where that is more, and
    shrinks only as far as both halves allow.

    Args:
        settings: Bounds.
        halves: Of the window; each must be worth a decision by itself.
        whole: The window.
        members: Live or joining, without those that drain.
        now: The time.
        ready_time: When a whole window is measured; None: it is unknown.
    """
    present = sum(member.accelerator_count for member in members)
    target, message = target_of(whole, present)
    if target < present:
        target = max(target_of(half, present)[0] for half in halves)
    elif target > present:
        target = max(target, target_of(halves[-1], present)[0])
    is_early = ready_time is None or now < ready_time
    if is_early and members:
        target, message = present, f"too early to tell: {message}"
    ordered = tuple(sorted(members, key=_goes_first))
    retired, added = _changes(settings, ordered, target - present)
    count = len(members) - len(retired) + added
    if count in (settings.min_count, settings.max_count) and target != present:
        message += f"; the pool has {settings.min_count} to {settings.max_count} nodes"
    gone = sum(member.accelerator_count for member in members if member.member_id in retired)
    action = ScaleAction.HOLD
    if count != len(members):
        action = ScaleAction.GROW if count > len(members) else ScaleAction.SHRINK
    return ScaleAdvice(
        action=action,
        accelerator_count=present,
        target_accelerator_count=present - gone + round(added * _mean_size(members)),
        member_count=len(members),
        target_member_count=count,
        balance=whole,
        members=ordered,
        retired=retired,
        message=message,
        cooldown_time=ready_time if is_early else None,
    )


def _changes(
    settings: ScaleSettings, ordered: Sequence[MemberBalance], difference: int
) -> tuple[frozenset[MemberId], int]:
    """Return who goes and how many come, within bounds, for so many accelerators more."""
    count = len(ordered)
    gone = frozenset[MemberId]()
    if difference < 0:
        gone = _retired(ordered, difference, floor_count=settings.min_count)
    if count - len(gone) > settings.max_count:
        gone = frozenset(member.member_id for member in ordered[: count - settings.max_count])
    wanted = count + ceil(max(0, difference) / _mean_size(ordered))
    bounded = min(max(wanted, settings.min_count), settings.max_count)
    return gone, max(0, bounded - count)


def _mean_size(members: Sequence[MemberBalance]) -> float:
    return sum(m.accelerator_count for m in members) / len(members) if members else 1.0


def _goes_first(member: MemberBalance) -> tuple[bool, float, int, MemberId]:
    """Order nodes by what the pool loses least with: joining, dear, slow, idle ones first."""
    price = member.accelerator_count if member.price_per_hour is None else member.price_per_hour
    worth = member.tokens_per_s / price if price else inf
    return member.is_live, round(worth, 1), member.inflight_count, member.member_id


def _retired(
    ordered: Sequence[MemberBalance], difference: int, *, floor_count: int
) -> frozenset[MemberId]:
    """Return who goes: as many as leave the wanted accelerators, and their share of the speed."""
    present = sum(member.accelerator_count for member in ordered)
    target = present + difference
    speed = sum(member.tokens_per_s for member in ordered)
    wanted_speed = speed * target / present
    retired: set[MemberId] = set()
    for member in ordered:
        is_low = len(ordered) - len(retired) <= max(1, floor_count)
        is_slow = speed - member.tokens_per_s < wanted_speed - 1e-9
        if is_low or is_slow or present - member.accelerator_count < target:
            continue
        present, speed = present - member.accelerator_count, speed - member.tokens_per_s
        retired.add(member.member_id)
    return frozenset(retired)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """Names of the nodes to start now, and members to let finish and leave."""

    start: tuple[str, ...] = ()
    drain: tuple[MemberId, ...] = ()


class Scaler:
    """Turns advice into plans; while nodes are on their way nothing is changed.

    Example:
        Advice of 4 nodes for 1: three are started. Advice of 4 for 2, while two of them are on
        their way: nothing is.
    """

    def __init__(self, *, prefix: str, start_timeout: timedelta) -> None:
        """Begin with no node on its way.

        Args:
            prefix: Of the names of nodes.
            start_timeout: A node that has not joined after so long is given up.
        """
        self._prefix = prefix
        self._start_timeout = start_timeout
        self._deadlines: dict[str, datetime] = {}
        self._count = 0

    @property
    def starting(self) -> tuple[str, ...]:
        return tuple(self._deadlines)

    def forget(self, name: str) -> None:
        """Give up a node that could not be started."""
        self._deadlines.pop(name, None)

    def plan(self, advice: ScaleAdvice, now: datetime) -> ScalePlan:
        joined = {member.name for member in advice.members}
        self._deadlines = {
            name: deadline
            for name, deadline in self._deadlines.items()
            if name not in joined and deadline > now
        }
        if self._deadlines:
            return ScalePlan()
        missing = max(0, advice.target_member_count - advice.member_count)
        numbers = range(self._count + 1, self._count + missing + 1)
        self._count += missing
        names = tuple(f"{self._prefix}-{number}" for number in numbers)
        self._deadlines |= dict.fromkeys(names, now + self._start_timeout)
        return ScalePlan(start=names, drain=tuple(sorted(advice.retired)))
