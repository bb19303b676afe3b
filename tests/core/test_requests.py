"""A RaaS asks for a version: the trainer is told once, when it makes nothing too old."""

import pytest

from astraflow.core.errors import AstraflowError, Reason


def train(world, trainer, *, step):
    header, _ = world.pop_batch(trainer)
    world.ack(trainer, header.batch_id, step=step)


def test_a_request_is_an_order_to_the_trainer_once_until_its_version_is_there(make_world):
    world = make_world(steps_per_version=None)
    trainer, node = world.started()
    assert world.ask(node).is_pending is False
    assert world.orders == []
    world.work(node)
    answer = world.ask(node)
    assert (answer.newest_version, answer.is_pending) == (0, True)
    assert world.ask(node).is_pending
    assert world.orders == []
    train(world, trainer, step=1)
    assert world.orders == [trainer]
    assert world.ask(node).is_pending
    world.publish(trainer, step=1)
    assert world.ask(node).newest_version == 1


def test_no_order_makes_a_batch_too_old_that_is_leased(make_world):
    world = make_world(steps_per_version=4, max_staleness=0)
    trainer, node = world.started(max_outstanding=2)
    world.work(node)
    train(world, trainer, step=1)
    world.ask(node)
    train(world, trainer, step=2)
    assert world.orders == []
    train(world, trainer, step=3)
    assert world.orders == [trainer]
    assert not world.batches[trainer, 0]


def test_an_order_is_repeated_to_a_stream_that_is_opened_again(make_world):
    world = make_world(steps_per_version=None)
    trainer, node = world.started()
    world.work(node)
    world.ask(node)
    train(world, trainer, step=1)
    world.open_stream(trainer)
    assert world.orders == [trainer, trainer]


def test_versions_that_are_only_asked_for_cost_no_staleness_meanwhile(make_world):
    world = make_world(steps_per_version=None, max_staleness=0)
    trainer, node = world.started(max_outstanding=4)
    for step in (1, 2, 3):
        world.work(node)
        assert len(world.batches[trainer, 0]) == 1
        header, _ = world.pop_batch(trainer)
        world.ack(trainer, header.batch_id, step=step)
    assert world.account().trained_count == 12
    assert not world.account().drops
    assert world.policy().version == 0


def test_several_steps_of_one_version_have_room_at_once(make_world):
    world = make_world(steps_per_version=3, max_staleness=0)
    trainer, node = world.started()
    assert world.policy().max_open_group_count == 6
    assert len(world.tasks[node]) == 6
    world.work(node)
    for step in (1, 2, 3):
        # Nothing waits for version 1 before all batches that it takes are trained on.
        assert not world.tasks[node]
        header, _ = world.pop_batch(trainer)
        world.ack(trainer, header.batch_id, step=step)
    assert [task.versions["solver"].min for task in world.tasks[node]] == [1] * 6


def test_nobody_can_be_asked_without_a_trainer(make_world):
    world = make_world()
    trainer, node = world.started()
    world.leave(trainer)
    with pytest.raises(AstraflowError) as caught:
        world.ask(node)
    assert caught.value.reason is Reason.NOT_READY
    with pytest.raises(AstraflowError) as caught:
        world.ask(node, "nobody")
    assert caught.value.reason is Reason.POLICY_UNKNOWN
