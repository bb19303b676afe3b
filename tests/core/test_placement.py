from datetime import UTC, datetime

import pytest

from astraflow.core.members import Resources, Role
from astraflow.core.placement import choose, eval_room, keeps_up, may_serve_pinned, training_room
from astraflow.core.sessions import RaasMember

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def node():
    def build(name="n", *, credit=8, out=0, live=None, **more):
        return RaasMember(
            member_id=name,
            name=name,
            role=Role.RAAS,
            incarnation=1,
            region="",
            resources=Resources(),
            join_time=NOW,
            keep_alive_time=NOW,
            policies={},
            live={"solver": live} if live is not None else {},
            max_outstanding=credit,
            outstanding=out,
            **more,
        )

    return build


def placed(nodes, wanted):
    room = choose(map(training_room, nodes), wanted)
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


def test_evaluation_gets_its_share_of_the_credit(node):
    assert eval_room(node(credit=8), 0.5).free == 4
    assert eval_room(node(credit=8, eval_outstanding=3, out=3), 0.5).free == 1
    assert eval_room(node(credit=8, out=8), 0.5).free == 0
    assert eval_room(node(credit=8, max_eval_outstanding=2), 0.5).free == 2
    assert eval_room(node(credit=1), 0.1).free == 1


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
    assert not may_serve_pinned(node(), pin)
    assert not may_serve_pinned(node(live=2, failed={"solver": 3}), pin)
