from datetime import timedelta

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import DirectiveKind, MemberState, RaasLoad
from astraflow.core.versions import VersionState


@pytest.fixture
def world(make_world):
    return make_world()


def member(world, member_id):
    members = world.run.status(world.clock.now()).members
    return next(m for m in members if m.member_id == member_id)


def test_session_lives_while_it_is_kept_alive(world):
    node = world.join()
    for _ in range(5):
        world.clock.advance(9)
        assert world.keep_alive(node).ttl == timedelta(seconds=10)
    world.tick(10)
    assert [close.member_id for close in world.closed] == [node]
    with pytest.raises(AstraflowError, match="SESSION_ENDED"):
        world.keep_alive(node)


def test_next_deadline_is_the_end_of_the_first_session(world):
    world.join("a")
    world.clock.advance(4)
    world.join("b")
    assert world.run.next_deadline - world.clock.now() == timedelta(seconds=6)


def test_silent_node_gets_nothing_new(world):
    world.publish(world.register())
    node = world.join(credit=0)
    world.report(node, 0)
    world.clock.advance(8)
    assert member(world, node).state is MemberState.SUSPECT
    world.credit(node, 8)
    assert not world.tasks.get(node)
    world.keep_alive(node)
    assert world.tasks[node]


def test_status_shows_who_is_where(world):
    node = world.join(region="home")
    assert member(world, node).state is MemberState.JOINING
    world.publish(world.register())
    world.report(node, 0)
    world.apply(ev.MemberKeptAlive(member_id=node, load=RaasLoad(inflight_count=3)))
    seen = member(world, node)
    assert (seen.state, seen.region, seen.versions) == (MemberState.LIVE, "home", {"solver": 0})
    assert seen.load.inflight_count == 3


def test_drained_node_finishes_and_gets_nothing_new(world):
    _, node = world.started(credit=4)
    world.apply(ev.MemberDrained(member_id=node, grace=timedelta(seconds=30)))
    assert world.directives[-1].directive.kind is DirectiveKind.DRAIN
    world.work(node)
    assert not world.tasks[node]
    world.clock.advance(5)
    directive = world.keep_alive(node).directive
    assert (directive.kind, directive.grace) == (DirectiveKind.DRAIN, timedelta(seconds=25))


def test_drained_node_that_overstays_is_sent_away(world):
    _, node = world.started(credit=4)
    world.apply(ev.MemberDrained(member_id=node, grace=timedelta(seconds=5)))
    world.tick(5)
    assert world.closed[-1].member_id == node
    assert not world.closed[-1].is_lost


def test_drained_trainer_is_told_again_by_a_stream_that_it_opens(world):
    trainer, _ = world.started(credit=4)
    world.open_stream(trainer)
    assert not world.directives
    world.apply(ev.MemberDrained(member_id=trainer, grace=timedelta(seconds=30)))
    world.clock.advance(5)
    world.open_stream(trainer)
    first, second = (each.directive for each in world.directives)
    assert (first.kind, second.kind) == (DirectiveKind.DRAIN, DirectiveKind.DRAIN)
    assert second.grace == timedelta(seconds=25)


def test_unknown_member_cannot_be_drained(world):
    with pytest.raises(AstraflowError) as caught:
        world.apply(ev.MemberDrained(member_id="raas-r-9"))
    assert caught.value.reason is Reason.MEMBER_UNKNOWN


def test_leaving_twice_is_fine(world):
    node = world.join()
    world.leave(node)
    world.leave(node)
    assert len(world.closed) == 1


def test_node_that_cannot_load_a_version_gets_no_work_for_it(make_world):
    world = make_world(max_staleness=0)
    trainer, node = world.started()
    world.work(node)
    world.report(node, 0)
    header, _ = world.pop_batch(trainer)
    world.publish(trainer)
    world.report(node, 1, state=VersionState.FAILED)
    world.ack(trainer, header.batch_id, step=1)
    assert not world.tasks[node]
    world.report(node, 1)
    assert world.tasks[node]


def test_roles_do_not_mix(world):
    trainer, node = world.started()
    for event in (
        ev.TaskCredit(member_id=trainer, max_outstanding=1),
        ev.StreamBatches(member_id=node),
    ):
        with pytest.raises(AstraflowError, match="ROLE_NOT_ALLOWED"):
            world.apply(event)


def test_report_of_a_version_that_does_not_exist_is_refused(world):
    _, node = world.started()
    with pytest.raises(AstraflowError, match="VERSION_UNKNOWN"):
        world.report(node, 1)
