"""Advice on the wire."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from astraflow.core.autoscale import (
    MemberBalance,
    PolicyBalance,
    PoolBalance,
    ScaleAction,
    ScaleAdvice,
)
from astraflow.wire.control import decode_advice, encode_advice


def make_advice():
    return ScaleAdvice(
        action=ScaleAction.SHRINK,
        accelerator_count=6,
        target_accelerator_count=4,
        member_count=3,
        target_member_count=2,
        balance=PoolBalance(
            span=timedelta(seconds=300),
            accelerator_count=6.0,
            busy_fraction=0.5,
            policies=(
                PolicyBalance(
                    policy_id="solver",
                    wait_fraction=0.25,
                    produced_count=9,
                    entered_count=8,
                    consumed_count=7,
                    stale_count=1,
                ),
            ),
        ),
        members=(
            MemberBalance(
                member_id="m1",
                name="node",
                accelerator_count=2,
                produced_count=3,
                tokens_per_s=5.5,
                price_per_hour=1.5,
                inflight_count=4,
            ),
            MemberBalance(member_id="m2", name="other", is_live=False),
        ),
        retired=frozenset({"m1"}),
        message="why",
        cooldown_time=datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_advice_survives_the_wire():
    advice = make_advice()
    assert decode_advice(encode_advice(advice)) == advice
    free = replace(advice, cooldown_time=None)
    assert decode_advice(encode_advice(free)) == free
