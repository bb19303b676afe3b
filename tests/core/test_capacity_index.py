from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.pool.sessions import Sessions

NOW = datetime(2026, 1, 1, tzinfo=UTC)


names = st.sampled_from("abcde")


def with_capacity(sessions, count):
    """Who has credit for so many samples, and serves anything."""
    buckets = sessions.capacity_index.buckets(count)
    return [member for _, bucket in buckets for _, member in bucket]


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("open"), names, st.just(0)),
            st.tuples(st.just("close"), names, st.just(0)),
            st.tuples(st.just("credit"), names, st.integers(0, 9)),
            st.tuples(st.just("heard"), names, st.integers(0, 30)),
            st.tuples(st.just("live"), names, st.integers(0, 2)),
            st.tuples(st.just("drain"), names, st.integers(0, 30)),
        )
    )
)
def test_indexes_say_what_a_look_at_everybody_would(make_raas, steps):
    sessions = Sessions(ttl=timedelta(seconds=10))
    for what, name, number in steps:
        known = sessions.members.get(name)
        if what == "open" and known is None:
            sessions.open(make_raas(name))
        elif known is not None:
            match what:
                case "close":
                    sessions.close(name)
                case "credit":
                    known.give_credit(number, None)
                case "live":
                    known.go_live("solver", number)
                case "heard":
                    later = NOW + timedelta(seconds=number)
                    known.keep_alive_time = max(known.keep_alive_time, later)
                case "drain":
                    sessions.drain(known, NOW + timedelta(seconds=number))
        for count in (1, 4):
            roomy = [member for member in sessions.pool.values() if member.free_count >= count]
            assert sessions.capacity_index.has_credit(count) == bool(roomy)
            assert {each.member_id for each in with_capacity(sessions, count)} == {
                each.member_id for each in roomy if each.live
            }
        assert sessions.next_end == min(map(sessions.end_of, sessions), default=None)


def test_session_that_is_opened_again_ends_by_its_own_time(make_raas):
    sessions = Sessions(ttl=timedelta(seconds=10))
    sessions.open(make_raas("a"))
    sessions.members.get("a").keep_alive_time = NOW + timedelta(seconds=1)
    assert sessions.next_end == NOW + timedelta(seconds=11)
    sessions.close("a")
    sessions.open(make_raas("a"))
    assert sessions.next_end == NOW + timedelta(seconds=10)


def test_credit_that_is_in_use_is_no_room(make_raas):
    sessions = Sessions(ttl=timedelta(seconds=10))
    node = make_raas("a")
    sessions.open(node)
    node.go_live("solver", 0)
    assert not with_capacity(sessions, 1)
    node.give_credit(3, None)
    assert with_capacity(sessions, 3) == [node]
    assert not with_capacity(sessions, 4)


def test_credit_of_who_serves_nothing_is_credit_and_no_room(make_raas):
    sessions = Sessions(ttl=timedelta(seconds=10))
    node = make_raas("a")
    sessions.open(node)
    node.give_credit(3, None)
    assert sessions.capacity_index.has_credit(3)
    assert not with_capacity(sessions, 3)
