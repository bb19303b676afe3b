"""The policy: worked examples and bounds."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.autoscale import (
    MemberBalance,
    PolicyBalance,
    PoolBalance,
    ScaleAction,
    ScaleSettings,
    advise,
    target_of,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = timedelta(seconds=300)


def balance(*, wait=0.0, live=4.0, busy=1.0, entered=100, consumed=100, **more):
    policy = PolicyBalance(
        policy_id="solver",
        wait_fraction=wait,
        entered_count=entered,
        consumed_count=consumed,
    )
    return PoolBalance(
        span=WINDOW, accelerator_count=live, busy_fraction=busy, policies=(policy,), **more
    )


def pool(count, **more):
    return [MemberBalance(member_id=f"m{i}", tokens_per_s=10.0, **more) for i in range(count)]


def advice(whole, members, *, halves=None, now=NOW, **settings):
    return advise(
        ScaleSettings(window=WINDOW, **settings),
        halves or (whole, whole),
        whole,
        members,
        now=now,
        ready_time=NOW,
    )


@pytest.mark.parametrize(
    ("wait", "busy", "target"),
    [(0.6, 1.0, 10), (0.11, 1.0, 5), (0.10, 1.0, 4), (0.05, 0.1, 4), (0.0, 1.0, 4), (0.0, 0.4, 2)],
)
def test_the_dead_band(wait, busy, target):
    assert target_of(balance(wait=wait, busy=busy), 4)[0] == target


def test_a_wait_of_all_the_time_grows_twentyfold():
    assert target_of(balance(wait=1.0, live=1.0), 1)[0] == 20


def test_what_turned_stale_was_not_needed():
    assert target_of(balance(live=10.0, entered=200, consumed=100), 10)[0] == 6


def test_nothing_shrinks_while_nothing_is_consumed():
    assert target_of(balance(busy=0.1, consumed=0), 4)[0] == 4


def test_nothing_shrinks_by_what_was_rolled_back():
    assert target_of(balance(consumed=-50), 4)[0] == 4


def test_an_idle_pool_does_not_grow():
    target, message = target_of(balance(wait=0.5, busy=0.4), 4)
    assert target == 4
    assert "max_staleness" in message


def test_a_half_empty_engine_is_more_than_half_as_fast():
    """100 of 400 tokens/s by time are one accelerator, but a full one makes only 60."""
    slack = balance(busy=0.25, token_rate=100.0, full_token_rate=60.0)
    assert target_of(slack, 4)[0] == 2


def test_what_is_used_says_how_far_to_grow():
    """3,200 tokens/s of training, 400 per accelerator: 8, though 5 that waited 0.2 say 7."""
    short = balance(wait=0.2, live=5.0, full_token_rate=400.0, used_token_rate=3200.0)
    assert target_of(short, 5)[0] == 8


@pytest.mark.parametrize(("busy", "target"), [(1.0, 8), (0.9, 7)])
def test_a_full_pool_that_is_known_to_be_short_grows_within_the_band(busy, target):
    short = balance(wait=0.07, live=7.0, busy=busy, full_token_rate=400.0, used_token_rate=3200.0)
    assert target_of(short, 7)[0] == target


@pytest.mark.parametrize(("present", "target"), [(8, 8), (9, 9), (10, 8), (30, 8)])
def test_a_pool_a_tenth_too_large_stays(present, target):
    slack = balance(live=8.0, busy=0.9, full_token_rate=400.0, used_token_rate=3200.0)
    assert target_of(slack, present)[0] == target


def test_joining_nodes_count():
    whole = balance(wait=0.75, live=1.0)
    members = [*pool(1), MemberBalance(member_id="new", is_live=False)]
    assert advice(whole, members).target_member_count == 4


def test_it_shrinks_only_as_far_as_both_halves_allow():
    calm, busy = balance(live=10.0, busy=0.2), balance(live=10.0, busy=0.6)
    whole = balance(live=10.0, busy=0.4)
    assert advice(whole, pool(10), halves=(busy, calm)).target_member_count == 7
    loaded = balance(live=10.0, wait=0.07)
    assert advice(whole, pool(10), halves=(loaded, calm)).action is ScaleAction.HOLD


def test_it_waits_for_a_whole_window():
    early = advice(balance(wait=0.5), pool(4), now=NOW - timedelta(seconds=1))
    assert early.action is ScaleAction.HOLD
    assert early.cooldown_time == NOW


def test_bounds_hold():
    assert advice(balance(wait=0.95), pool(4), max_count=6).target_member_count == 6
    assert advice(balance(busy=0.05), pool(4), min_count=3).target_member_count == 3
    grown = advice(balance(live=0.0), [], min_count=2)
    assert (grown.action, grown.target_member_count) == (ScaleAction.GROW, 2)


def test_a_pool_that_may_be_empty_grows_while_a_trainer_waits():
    waits = advice(balance(wait=1.0, live=0.0, entered=0, consumed=0), [], min_count=0)
    assert (waits.action, waits.target_member_count) == (ScaleAction.GROW, 1)
    trains = advice(balance(live=0.0, entered=0, consumed=0), [], min_count=0)
    assert (trains.action, trains.target_member_count) == (ScaleAction.HOLD, 0)


def test_slow_idle_and_dear_nodes_go_first():
    members = [
        MemberBalance(member_id="fast", tokens_per_s=100.0),
        MemberBalance(member_id="full", tokens_per_s=10.0, inflight_count=8),
        MemberBalance(member_id="empty", tokens_per_s=10.0),
    ]
    shrunk = advice(balance(live=3.0, busy=0.6), members)
    assert shrunk.retired == {"empty"}


def test_nodes_that_cost_nothing_go_last():
    """Their owner says a price of 0."""
    members = [
        MemberBalance(member_id="own", tokens_per_s=10.0, price_per_hour=0.0),
        MemberBalance(member_id="rented", tokens_per_s=10.0, price_per_hour=2.0),
        MemberBalance(member_id="dear", tokens_per_s=10.0, price_per_hour=4.0),
    ]
    assert advice(balance(live=3.0, busy=0.3), members).retired == {"rented", "dear"}


def test_a_fast_node_is_not_given_up_for_a_slow_ones_share():
    members = [MemberBalance(member_id="a", tokens_per_s=100.0)]
    members += [MemberBalance(member_id=f"s{i}", tokens_per_s=10.0) for i in range(3)]
    assert "a" not in advice(balance(busy=0.4), members).retired


def test_large_nodes_are_counted_by_accelerators():
    members = pool(2, accelerator_count=4)
    grown = advice(balance(wait=0.5, live=8.0), members)
    assert (grown.target_member_count, grown.target_accelerator_count) == (4, 16)


@given(
    wait=st.floats(0, 1),
    busy=st.floats(0, 1),
    count=st.integers(0, 40),
    low=st.integers(0, 20),
    more=st.integers(1, 20),
)
def test_advice_stays_within_bounds_and_adds_up(wait, busy, count, low, more):
    whole = balance(wait=wait, busy=busy, live=float(count))
    given_advice = advice(whole, pool(count), min_count=low, max_count=low + more)
    target = given_advice.target_member_count
    assert low <= target <= low + more
    assert len(given_advice.retired) == max(0, count - target)
    assert given_advice.target_accelerator_count == target
