"""A trainer that comes back at an older step takes the books back to it."""

import pytest

from astraflow.core.batches import BatchOutcome
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.settings import ReplaySettings
from astraflow.core.status import RolloutPlace


@pytest.fixture
def world(make_world):
    return make_world(groups_per_batch=2, group_size=2, max_staleness=1)


def train_steps(world, trainer, node, count, *, save_at=()):
    for _ in range(count):
        world.work(node)
        header, _ = world.pop_batch(trainer)
        step = world.policy().step + 1
        world.publish(trainer, step=step)
        name = f"step_{step}" if step in save_at else ""
        world.ack(trainer, header.batch_id, step=step, checkpoint_id=name)
        world.report(node, world.policy().version)


def come_back(world, trainer, **state):
    world.leave(trainer)
    return world.register(**state)


def test_what_was_trained_after_the_checkpoint_is_not_trained(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 5, save_at=(3,))
    assert world.account().trained_count == 20
    come_back(world, trainer, checkpoint_id="step_3", last_step=3)
    account = world.account()
    assert account.trained_count == 12
    assert account.is_balanced
    assert world.policy().step == 3


def test_the_steps_behind_a_checkpoint_need_not_be_told(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 3, save_at=(2,))
    successor = come_back(world, trainer, checkpoint_id="step_2")
    assert world.policy().step == 2
    come_back(world, successor)
    assert world.policy().step == 0


def test_what_is_new_enough_is_trained_on_again(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 2, save_at=(1,))
    world.work(node)
    (header, _) = world.pop_batch(trainer)
    # Trained on, and lost before any version came of it.
    world.ack(trainer, header.batch_id, step=3)
    before = world.account()
    successor = come_back(world, trainer, checkpoint_id="step_1", last_step=1)
    after = world.account()
    assert after.fresh_count > before.fresh_count
    assert after.trained_count == 4
    world.publish(successor, step=1)
    world.open_stream(successor)
    again, parts = world.pop_batch(successor)
    assert {count for part in parts for count in part.values("use_count").tolist()} == {0}
    assert world.ack(successor, again.batch_id, step=2)
    assert world.account().is_balanced


def test_open_groups_stay_within_their_bound(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 4, save_at=(1,))
    world.work(node)
    come_back(world, trainer, checkpoint_id="step_1", last_step=1)
    policy = world.policy()
    assert policy.open_group_count <= policy.max_open_group_count


def test_a_checkpoint_that_the_run_never_heard_of_is_refused(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 2, save_at=(1,))
    for state in ({"checkpoint_id": "step_2", "last_step": 2}, {"last_step": 3}):
        with pytest.raises(AstraflowError, match="step_1") as error:
            come_back(world, trainer, **state)
        assert error.value.reason is Reason.CHECKPOINT_UNKNOWN
    assert world.account().trained_count == 8


def test_a_lineage_that_was_left_is_forgotten(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 3, save_at=(1, 3))
    successor = come_back(world, trainer, checkpoint_id="step_1", last_step=1)
    with pytest.raises(AstraflowError, match="step_1"):
        come_back(world, successor, checkpoint_id="step_3", last_step=3)


def test_new_work_is_sampled_for_the_restored_version(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 4, save_at=(2,))
    successor = come_back(world, trainer, checkpoint_id="step_2", last_step=2)
    version = world.policy().version
    assert world.publish(successor, step=2) == version + 2
    world.report(node, version + 1)
    world.open_stream(successor)
    while not world.batches.get((successor, 0)):
        assert world.work(node)
    header, _ = world.pop_batch(successor)
    assert header.metrics["lag/max"] <= 1


def test_the_step_limit_counts_the_lineage(make_world):
    world = make_world(step_count=3, max_staleness=1)
    trainer, node = world.started()
    train_steps(world, trainer, node, 2, save_at=(1,))
    successor = come_back(world, trainer, checkpoint_id="step_1", last_step=1)
    world.publish(successor, step=1)
    world.open_stream(successor)
    world.report(node, world.policy().version)
    train_steps(world, successor, node, 2)
    assert world.policy().step == 3
    assert world.account().trained_count == 12


def test_replayed_uses_are_taken_back(make_world):
    replay = ReplaySettings(ratio=0.5, max_uses=4, max_staleness=9)
    world = make_world(max_staleness=1, serving={"replay": replay})
    trainer, node = world.started()
    train_steps(world, trainer, node, 4, save_at=(2,))
    used = world.account().replayed_count
    come_back(world, trainer, checkpoint_id="step_2", last_step=2)
    assert world.account().replayed_count < used
    assert world.account().is_balanced


def test_records_say_what_is_no_longer_trained(world):
    trainer, node = world.started()
    train_steps(world, trainer, node, 4, save_at=(2,))
    come_back(world, trainer, checkpoint_id="step_2", last_step=2)
    places = [p.place for record in world.run.rollouts() for p in record.placements]
    assert places.count(RolloutPlace.TRAINED) == world.account().trained_count


def test_returned_batches_are_in_no_lineage(world):
    trainer, node = world.started()
    world.work(node)
    header, _ = world.pop_batch(trainer)
    world.ack(trainer, header.batch_id, BatchOutcome.RETURNED)
    come_back(world, trainer)
    assert world.account().is_balanced


def test_what_was_replayed_stays_where_it_was_trained_first(make_world):
    replay = ReplaySettings(ratio=0.5, max_uses=4, max_staleness=9)
    world = make_world(max_staleness=2, serving={"replay": replay})
    trainer, node = world.started()
    train_steps(world, trainer, node, 4, save_at=(3,))
    come_back(world, trainer, checkpoint_id="step_3", last_step=3)
    placements = [p for record in world.run.rollouts() for p in record.placements]
    trained = [p for p in placements if p.place is RolloutPlace.TRAINED]
    assert len(trained) == world.account().trained_count
    assert {p.batch_id for p in trained} == {"batch-r-0", "batch-r-1", "batch-r-2"}
