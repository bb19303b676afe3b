"""Pool size: how large the pool should be, from what was measured over a window.

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

from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Final

from astraflow.core.ids import PolicyId

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
        policy_id: Which.
        wait_fraction: Share of the time that its trainer waited for a batch, 0 to 1.
        produced_count: Accepted for it.
        entered_count: Kept after filters.
        consumed_count: Trained on.
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
        """Share of what entered that was needed; None: nothing entered, or nothing was used."""
        if not self.entered_count or not self.consumed_count:
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
    """Return how many accelerators are wanted, and why.

    Args:
        balance: Of the window.
        present: Accelerators that are live or joining.
    """
    said = f"trainers waited {balance.wait_fraction:.0%} of {_seconds(balance.span)}"
    if balance.wait_fraction > WAIT_HIGH or _is_short(balance, present):
        return _grown(balance, present, said)
    need = _need(balance)
    if balance.wait_fraction < WAIT_LOW and need is not None:
        said += f", and what was consumed keeps {need:.1f} accelerators busy"
        return _shrunk(balance, present, need), said
    return present, f"{said}: enough, and not too much"


def _is_short(balance: PoolBalance, present: int) -> bool:
    """Whether a pool that is all at work is known to make too little, before much is waited for."""
    right = balance.right_count
    is_full = balance.wait_fraction > WAIT_LOW and balance.busy_fraction >= FULL
    return is_full and right is not None and _ceil(right) > present


def _grown(balance: PoolBalance, present: int, said: str) -> tuple[int, str]:
    """Return what is enough, unless the pool has something to spare."""
    live = balance.accelerator_count
    busy = balance.busy_fraction if live > 0 else 1.0
    right = balance.right_count
    if right is None:
        right = live * busy / (1 - min(balance.wait_fraction, WAIT_CAP))
    grown = _ceil(right)
    if grown <= present and busy < FULL:
        return present, (
            f"{said}, but the pool was {busy:.0%} busy: more nodes do not help; see what the "
            "trainer waits for, or raise max_staleness"
        )
    return max(present, grown), f"{said}: {live:.1f} accelerators are too few"


def _shrunk(balance: PoolBalance, present: int, need: float) -> int:
    """Return what is left when a tenth more than what is needed is less than what there is.

    Just that is left, if it is known well.
    """
    padded = max(1, _ceil(need * SHRINK_PAD))
    if padded >= present or balance.right_count is None:
        return min(present, padded)
    return max(1, _ceil(need))


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


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():g} s"
