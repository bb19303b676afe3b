"""What a run measures of itself, and advises."""

from astraflow.core.autoscale import ScaleAction
from astraflow.core.events import MemberDrained


def test_a_run_without_nodes_asks_for_the_least(make_world):
    world = make_world()
    advice = world.run.scale_advice(world.clock.now())
    assert (advice.action, advice.target_member_count) == (ScaleAction.GROW, 1)


def test_a_trainer_that_waits_grows_the_pool(make_world):
    world = make_world()
    trainer, node = world.started(credit=2)
    for _ in range(50):
        world.clock.advance(8)
        world.keep_alive(node)
        world.keep_alive(trainer)
        world.tick()
    advice = world.run.scale_advice(world.clock.now())
    assert advice.balance.wait_fraction == 1.0
    assert advice.balance.accelerator_count == 1.0


def test_a_draining_node_is_not_of_the_pool(make_world):
    world = make_world()
    _, node = world.started()
    other = world.join("other")
    world.run.apply(MemberDrained(member_id=node), world.clock.now())
    advice = world.run.scale_advice(world.clock.now())
    assert [member.member_id for member in advice.members] == [other]
    assert not advice.members[0].is_live
