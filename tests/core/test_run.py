import pytest

from astraflow.core.batches import EndCause
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState


def books_balance(world):
    return all(account.is_balanced for account in world.run.accounts())


def test_run_trains_to_its_step_limit(make_world):
    world = make_world(step_count=3)
    trainer, node = world.started()
    while world.policy().step < 3:
        world.work(node)
        world.train(trainer)
        world.report(node, world.policy().version)
    assert world.ends[trainer, 0].cause is EndCause.STEP_LIMIT
    assert world.ends[trainer, 0].batch_count == 3
    assert world.account().trained_count == 3 * 2 * 2
    assert books_balance(world)
    assert world.state is RunState.DONE


def test_finite_data_is_trained_to_the_last_row(make_world):
    world = make_world(prompt_count=5)
    trainer, node = world.started()
    sizes = []
    for _ in range(3):
        world.work(node)
        sizes.append(len(world.train(trainer).groups))
        world.report(node, world.policy().version)
    assert sizes == [2, 2, 1]
    assert world.ends[trainer, 0].cause is EndCause.SOURCE_EXHAUSTED
    assert world.account().trained_count == 10
    assert world.states == [
        RunState.RUNNING,
        RunState.SOURCE_EXHAUSTED,
        RunState.STOPPING,
        RunState.DONE,
    ]


def test_hub_closes_when_everybody_has_left(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    world.leave(trainer)
    assert not world.is_over
    world.leave(node)
    assert world.is_over


def test_hub_closes_when_the_grace_to_leave_is_over(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    world.clock.advance(9)
    world.keep_alive(node)
    world.keep_alive(trainer)
    assert (world.run.next_deadline - world.clock.now()).total_seconds() == 1
    world.tick(1)
    assert world.is_over


def test_an_event_that_raises_changes_nothing(make_world):
    world = make_world()
    trainer, _node = world.started()
    before = world.run.status(world.clock.now()), world.run.accounts()
    with pytest.raises(AstraflowError) as caught:
        world.publish(trainer, version=7)
    assert caught.value.reason is Reason.VERSION_NOT_NEXT
    assert (world.run.status(world.clock.now()), world.run.accounts()) == before


def test_a_version_that_hides_the_steps_behind_it_is_refused(make_world):
    world = make_world(groups_per_batch=1, max_staleness=1)
    trainer, node = world.started(credit=100)
    world.work(node)
    header, _ = world.pop_batch(trainer)
    world.publish(trainer, step=0)
    world.ack(trainer, header.batch_id, step=1)
    with pytest.raises(AstraflowError, match="step=0, no more than version 1") as caught:
        world.publish(trainer, step=0)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata == {"field": "step"}
    world.publish(trainer, step=2)
    assert world.policy().version == 2


class TestEventsThatComeTogether:
    def test_credit_that_they_free_is_used_after_the_last_one(self, make_world):
        world = make_world(group_size=4, keeps_together=False)
        _, node = world.started(credit=4)
        first, second = world.pop_task(node), world.pop_task(node)
        there = len(world.tasks[node])
        world.goes_on = True
        world.send(node, first, first.sample_indexes[0])
        assert len(world.tasks[node]) == there
        world.goes_on = False
        world.send(node, second, second.sample_indexes[0])
        assert len(world.tasks[node]) == there + 2

    def test_a_group_that_became_whole_is_in_a_batch_after_the_last_one(self, make_world):
        world = make_world(groups_per_batch=1)
        trainer, node = world.started()
        task, other = world.pop_task(node), world.pop_task(node)
        world.goes_on = True
        world.send(node, task, 0)
        world.send(node, task, 1)
        assert not world.batches
        world.goes_on = False
        world.send(node, other, 0)
        assert world.batches[trainer, 0]
