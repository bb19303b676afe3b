"""What a run measures of itself, and advises."""

from datetime import timedelta

from astraflow.core.autoscale import ScaleAction
from astraflow.core.events import EvalCreated, MemberDrained
from astraflow.core.members import Resources
from astraflow.wire.control import decode_advice, encode_advice


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


def test_nodes_that_say_absurd_sizes_do_not_keep_the_advice_from_others(make_world):
    world = make_world()
    for name in ("one", "other"):
        world.join(name, resources=Resources(accelerator_count=2**31 - 1))
    advice = world.run.scale_advice(world.clock.now())
    assert decode_advice(encode_advice(advice)).accelerator_count == advice.accelerator_count


def test_a_draining_node_is_not_of_the_pool(make_world):
    world = make_world()
    _, node = world.started()
    other = world.join("other")
    world.run.apply(MemberDrained(member_id=node), world.clock.now())
    advice = world.run.scale_advice(world.clock.now())
    assert [member.member_id for member in advice.members] == [other]
    assert not advice.members[0].is_live


def test_a_node_that_came_back_has_produced_what_it_did_since(make_world):
    world = make_world(groups_per_batch=4)
    _, node = world.started(credit=4)
    world.work(node, 3)
    world.tick(9.5)
    world.tick(20)
    world.join(resumes=node, credit=2)
    world.report(node, 0)
    world.work(node, 1)
    (back,) = world.run.scale_advice(world.clock.now(), timedelta(seconds=25)).members
    assert back.produced_count == 2


def test_what_evaluations_use_is_used(make_world, suite):
    def used(repeats):
        world = make_world(
            suites=(suite(at_start=False, at_end=False, repeats=repeats),), eval_prompt_count=8
        )
        trainer, node = world.started()
        world.apply(EvalCreated(request_id="a", suite="main"))
        for version in range(1, 9):
            for member in (trainer, node):
                world.clock.advance(2)
                world.keep_alive(member)
            world.work(node, 16)
            world.train(trainer)
            world.report(node, version)
        return world.run.scale_advice(world.clock.now()).balance.used_token_rate

    assert used(repeats=4) > used(repeats=1) > 0
