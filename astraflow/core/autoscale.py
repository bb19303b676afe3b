"""Auto-scaling: which nodes come and go, so that the pool has the size that is right.

`pool_size` says how large that is; here are bounds, patience, and who goes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil

from astraflow.core.ids import MemberId
from astraflow.core.pool_size import PoolBalance, target_of


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
        member_id: Which.
        name: As it joined.
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
        action: Which way to go.
        accelerator_count: Live or joining, without those that drain.
        target_accelerator_count: Wanted.
        member_count: Nodes that are live or joining.
        target_member_count: Wanted.
        balance: What it rests on.
        members: The nodes; who should go first comes first.
        retired: Those to be drained.
        message: Why, for people.
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
    return ScaleAdvice(
        action=_action(added - len(retired)),
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


def _action(difference: int) -> ScaleAction:
    if difference == 0:
        return ScaleAction.HOLD
    return ScaleAction.GROW if difference > 0 else ScaleAction.SHRINK


def _goes_first(member: MemberBalance) -> tuple[bool, float, int, MemberId]:
    """Order nodes by what the pool loses least with: joining, dear, slow, idle ones first."""
    rate = member.tokens_per_s / member.accelerator_count
    worth = rate if member.price_per_hour is None else member.tokens_per_s / member.price_per_hour
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
