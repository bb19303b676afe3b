from astraflow.core.errors import Failure, Reason
from astraflow.core.status import RunState
from astraflow.core.versions import VersionState

BROKEN = Failure(reason=Reason.APPLY_FAILED, message="tensor w has another shape")


def fail(world, node, version=0):
    world.report(node, version, state=VersionState.FAILED, failure=BROKEN)


def pass_time(world, seconds):
    for _ in range(seconds):
        for member in world.run.status(world.clock.now()).members:
            world.keep_alive(member.member_id)
        world.tick(1)


def begun(world, count=2):
    trainer = world.register()
    world.publish(trainer)
    world.open_stream(trainer)
    return [world.join(f"node{number}") for number in range(count)]


def test_run_fails_when_nobody_can_load_the_first_version(make_world):
    world = make_world()
    first, second = begun(world)
    fail(world, first)
    pass_time(world, 70)
    assert world.state is RunState.WAITING or world.state is RunState.RUNNING
    fail(world, second)
    pass_time(world, 61)
    assert world.state is RunState.FAILED
    failure = world.run.status(world.clock.now()).failure
    assert failure.reason is Reason.APPLY_FAILED
    assert "version 0 of solver: tensor w has another shape" in failure.message


def test_node_that_loads_it_after_all_saves_the_run(make_world):
    world = make_world()
    first, second = begun(world)
    fail(world, first)
    fail(world, second)
    pass_time(world, 40)
    world.report(second, 0)
    pass_time(world, 40)
    assert not world.state.is_final
    world.work(second)


def test_nodes_wait_for_a_trainer_that_takes_long_to_publish(make_world):
    world = make_world()
    world.join("node0")
    pass_time(world, 70)
    assert not world.state.is_final
    trainer = world.register()
    world.publish(trainer)
    world.open_stream(trainer)
    assert not world.state.is_final


def test_a_trainer_hears_of_a_version_that_does_not_verify(make_world):
    world = make_world()
    trainer, node = world.started()
    fail(world, node)
    assert not world.doubts
    unsound = Failure(reason=Reason.DIGEST_MISMATCH, message="other bytes")
    world.report(node, 0, state=VersionState.FAILED, failure=unsound)
    assert [(each.member_id, each.version) for each in world.doubts] == [(trainer, 0)]
    world.leave(trainer)
    world.report(node, 0, state=VersionState.FAILED, failure=unsound)
    assert len(world.doubts) == 1


def test_later_versions_that_fail_are_the_matter_of_the_nodes(make_world):
    world = make_world()
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    fail(world, node, 1)
    pass_time(world, 70)
    assert not world.state.is_final
