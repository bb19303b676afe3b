from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.pool.capacity import Speed
from astraflow.core.pool.live_members import CapacityIndex
from astraflow.core.work.scheduler import (
    PlacementRequest,
    PoolView,
    choose,
    eval_capacity,
    is_slow,
    keeps_up,
    may_serve_pinned,
    pick,
    training_capacity,
)


@pytest.fixture(scope="session")
def node(make_raas):
    def build(name="n", *, credit=8, out=0, live=0, token_s=0.0, load=8.0, **more):
        return make_raas(
            name,
            live={} if live is None else {"solver": live},
            max_outstanding=credit,
            outstanding=out,
            speed=Speed(token_s=token_s, load=load),
            **more,
        )

    return build


def look_at(nodes, *, unit=8):
    rooms = CapacityIndex(unit=unit)
    for number, each in enumerate(nodes):
        each.number = number
        rooms.changed[each.member_id] = each
    return PoolView(index=rooms, pool=nodes, is_fit=lambda _: True, capacity_of=training_capacity)


def placed(nodes, wanted, **more):
    room = choose(look_at(nodes, unit=wanted), PlacementRequest(count=wanted, **more))
    return room and (room.member.name, min(room.free, wanted))


def test_most_free_credit_first_then_the_least_loaded(node):
    assert placed([node("a", out=4), node("b", out=2)], 2) == ("b", 2)
    assert placed([node("a", credit=12, out=4), node("b", out=0)], 2) == ("b", 2)
    assert placed([node("a"), node("b")], 2) == ("a", 2)


def test_group_waits_for_a_node_that_can_take_it_whole(node):
    assert placed([node("a", out=3), node("b", out=1)], 8) is None


def test_group_is_split_when_no_node_is_ever_large_enough(node):
    assert placed([node("a", credit=4, out=1), node("b", credit=4)], 8) == ("b", 4)


def test_nobody_has_room(node):
    assert placed([node("a", out=8)], 1) is None
    assert placed([], 1) is None


def test_who_is_done_first_gets_the_work(node):
    pool = [node("slow", token_s=0.03), node("fast", token_s=0.01)]
    assert placed(pool, 4, token_count=100) == ("fast", 4)
    # 100 tokens take 1 s on the fast one at its load of 8, and 2 s with 16 out.
    busy = node("fast", token_s=0.01, credit=32, out=12)
    assert placed([node("slow", token_s=0.03), busy], 4, token_count=100) == ("fast", 4)
    swamped = node("fast", token_s=0.01, credit=64, out=24)
    assert placed([node("slow", token_s=0.03), swamped], 4, token_count=100) == ("slow", 4)


def test_who_was_never_measured_is_taken_to_be_fast(node):
    pool = [node("fast", token_s=0.01, credit=64, out=16), node("new")]
    assert placed(pool, 4, token_count=100, fastest_token_s=0.01) == ("new", 4)


def test_slow_node_gets_what_it_can_finish_in_time(node):
    pool = [node("slow", token_s=0.09), node("fast", token_s=0.01, out=8)]
    assert placed(pool, 4, token_count=100, slack_s=lambda _: 10) == ("slow", 4)
    assert placed(pool, 4, token_count=100, slack_s=lambda _: 5) is None


def test_nobody_is_looked_at_who_takes_longer_than_anybody_may(node):
    asked = []

    def slack_s(live):
        asked.append(live["solver"])
        return 5.0

    pool = [node("slow", token_s=0.09), node("fast", token_s=0.01, out=8, live=1)]
    assert placed(pool, 4, token_count=100, slack_s=slack_s, latest_s=5.0) is None
    assert asked == [1]  # By itself, with nothing else to do; the slow one never is in time.


def test_work_that_nobody_can_finish_in_time_goes_to_who_is_done_first(node):
    pool = [node("slow", token_s=0.09), node("fast", token_s=0.01)]
    assert placed(pool, 4, token_count=100, slack_s=lambda _: 0.5) == ("fast", 4)


def test_nobody_waits_for_a_node_that_takes_nothing(node):
    paused = node("fast", token_s=0.01, credit=0)
    small = node("small", token_s=0.01, credit=2)
    pool = [node("slow", token_s=0.09), paused, small]
    assert placed(pool, 4, token_count=100, slack_s=lambda _: 5) == ("slow", 4)


loads = st.tuples(
    st.integers(0, 12),  # credit
    st.integers(0, 12),  # out
    st.sampled_from([0.0, 0.01, 0.02, 0.09]),  # seconds per token
    st.sampled_from([4.0, 8.0]),  # load
)


@given(
    nodes=st.lists(loads, max_size=8),
    wanted=st.integers(1, 8),
    unit=st.sampled_from([1, 4, 8]),
    slack_s=st.sampled_from([None, 0.5, 2.0, 20.0]),
)
def test_a_look_at_few_finds_what_a_look_at_everybody_would(node, nodes, wanted, unit, slack_s):
    pool = [
        node(str(n), credit=credit, out=out, token_s=token_s, load=load)
        for n, (credit, out, token_s, load) in enumerate(nodes)
    ]
    want = PlacementRequest(
        count=wanted,
        token_count=100,
        fastest_token_s=0.01,
        slack_s=None if slack_s is None else lambda _: slack_s,
        latest_s=inf if slack_s is None else slack_s,
    )
    found = choose(look_at(pool, unit=unit), want)
    assert found == of_everybody([training_capacity(each) for each in pool], want)


def of_everybody(rooms, want):
    """The rule of `choose`, spelled out."""
    able = [room for room in rooms if room.free >= want.count]
    if not able and any(room.most >= want.count for room in rooms):
        return None
    able = able or [room for room in rooms if room.free]

    def is_in_time(member, outstanding):
        return not want.slack_s or want.finish_s(member, outstanding) <= want.slack_s(member.live)

    in_time = [room for room in able if is_in_time(room.member, room.member.outstanding)]
    if able and not in_time:
        least = min(want.count, max(room.free for room in able))
        idle = [room for room in rooms if room.most >= least]
        if any(is_in_time(room.member, 0) for room in idle):
            return None

    def rank(room):
        member = room.member
        finish_s = want.finish_s(member, member.outstanding)
        return finish_s, -room.free, member.outstanding, member.number

    return min(in_time or able, key=rank, default=None)


def test_short_prompts_go_to_slow_nodes(node):
    assert pick([900, 400, 500], mean=500) == 1
    assert pick([450, 400], mean=500) == 0
    assert is_slow(node(token_s=0.02), 0.01)
    assert not is_slow(node(token_s=0.014), 0.01)
    assert not is_slow(node(), 0.01)


def test_evaluation_gets_its_share_of_the_credit(node):
    assert eval_capacity(node(credit=8), 0.5).free == 4
    assert eval_capacity(node(credit=8, eval_outstanding=3, out=3), 0.5).free == 1
    assert eval_capacity(node(credit=8, out=8), 0.5).free == 0
    assert eval_capacity(node(credit=8, max_eval_outstanding=2), 0.5).free == 2
    assert eval_capacity(node(credit=1), 0.1).free == 1


def test_evaluation_takes_what_is_beyond_the_credit_first(node):
    full = node(credit=8, out=8, max_eval_extra=2)
    assert (eval_capacity(full, 0.5).free, eval_capacity(full, 0.1).free) == (2, 1)
    beside = node(credit=8, out=9, eval_outstanding=2, max_eval_extra=2)
    assert (training_capacity(beside).free, eval_capacity(beside, 0.5).free) == (1, 1)
    assert eval_capacity(node(credit=8, max_eval_outstanding=0, max_eval_extra=2), 0.5).free == 2


def test_node_one_version_behind_is_about_to_update(node):
    def may(live, wanted, newest, **more):
        return keeps_up(node(live=live, **more), {"solver": wanted}, {"solver": newest})

    assert may(5, 5, 5)
    assert may(4, 5, 5)
    assert may(5, 6, 5)
    assert not may(3, 5, 5)
    assert not may(None, 0, 5)
    assert not may(4, 5, 5, failed={"solver": 5})


def test_pinned_version_is_served_live_kept_or_to_come(node):
    pin = {"solver": 3}
    assert may_serve_pinned(node(live=3), pin)
    assert may_serve_pinned(node(live=2), pin)
    assert not may_serve_pinned(node(live=4), pin)
    assert may_serve_pinned(node(live=4, pinned={("solver", 3)}), pin)
    assert not may_serve_pinned(node(live=3, refused={("solver", 3)}), pin)
    assert not may_serve_pinned(node(live=None), pin)
    assert not may_serve_pinned(node(live=2, failed={"solver": 3}), pin)
