"""From advice to plans."""

from datetime import UTC, datetime, timedelta

from astraflow.core.autoscale import MemberBalance, PoolBalance, ScaleAction, ScaleAdvice, Scaler

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def advice(count, target, *, names=(), retired=()):
    difference = target - count
    action = ScaleAction.GROW if difference > 0 else ScaleAction.SHRINK
    return ScaleAdvice(
        action=action if difference else ScaleAction.HOLD,
        accelerator_count=count,
        target_accelerator_count=target,
        member_count=count,
        target_member_count=target,
        balance=PoolBalance(span=timedelta(), accelerator_count=count, busy_fraction=1.0),
        members=tuple(MemberBalance(member_id=name, name=name) for name in names),
        retired=frozenset(retired),
    )


def scaler():
    return Scaler(prefix="n", start_timeout=timedelta(seconds=60))


def test_what_is_missing_is_started_once():
    plans = scaler()
    assert plans.plan(advice(1, 3), NOW).start == ("n-1", "n-2")
    assert not plans.plan(advice(1, 4), NOW).start
    assert not plans.plan(advice(2, 3, names=("n-1",)), NOW).start
    assert plans.starting == ("n-2",)


def test_a_node_that_does_not_come_is_given_up():
    plans = scaler()
    plans.plan(advice(0, 1), NOW)
    later = NOW + timedelta(seconds=61)
    assert plans.plan(advice(0, 1), later).start == ("n-2",)


def test_a_node_that_could_not_be_started_is_asked_for_again():
    plans = scaler()
    plans.plan(advice(0, 1), NOW)
    plans.forget("n-1")
    assert plans.plan(advice(0, 1), NOW).start == ("n-2",)


def test_nobody_is_drained_while_nodes_are_on_their_way():
    plans = scaler()
    plans.plan(advice(1, 2), NOW)
    assert not plans.plan(advice(1, 0, retired=("a",)), NOW).drain
    assert plans.plan(advice(2, 1, names=("n-1",), retired=("a",)), NOW).drain == ("a",)
