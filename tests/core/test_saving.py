"""A checkpoint of the whole run is there once every trainer has saved under its id."""

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import StopMode

BOTH = ("solver", "verifier")


@pytest.fixture
def world(make_world):
    return make_world()


def ask(world, name="mine"):
    world.apply(ev.SaveRequested(checkpoint_id=name))


def step(world, trainer, node, policy="solver", *, name=""):
    """Train on the next batch and acknowledge it with a checkpoint; return the batch."""
    world.work(node)
    header, _ = world.pop_batch(trainer)
    number = world.policy(policy).step + 1
    world.publish(trainer, policy, step=number)
    world.ack(trainer, header.batch_id, step=number, checkpoint_id=name)
    world.report(node, world.policy(policy).version, policy)
    return header


def refused(world, *names, reason):
    for name in names:
        with pytest.raises(AstraflowError) as error:
            ask(world, name)
        assert error.value.reason is reason


def test_the_ack_after_the_order_saves(world):
    trainer, node = world.started()
    step(world, trainer, node)
    ask(world)
    assert world.save_orders == [(trainer, "mine")]
    assert world.run.saved("mine") is None
    step(world, trainer, node, name="mine")
    saved = world.run.saved("mine")
    assert [(part.step, part.version) for part in saved.policies] == [(2, 2)]
    assert saved.drawn_counts == world.run.drawn_counts
    assert world.saved == [saved]


def test_every_trainer_has_to_save(make_world):
    world = make_world(policies=BOTH)
    (solver, verifier), node = world.started()
    ask(world)
    step(world, solver, node, name="mine")
    assert world.run.saved("mine") is None
    step(world, verifier, node, "verifier", name="mine")
    assert [part.policy_id for part in world.run.saved("mine").policies] == list(BOTH)


def test_it_is_made_once(world):
    trainer, node = world.started()
    ask(world)
    ask(world)
    step(world, trainer, node, name="mine")
    ask(world)
    assert world.save_orders == [(trainer, "mine")]
    assert len(world.saved) == 1


def test_a_trainer_that_waits_names_its_last_batch(world):
    trainer, node = world.started()
    first = step(world, trainer, node)
    second = step(world, trainer, node)
    ask(world)
    world.ack(trainer, first.batch_id, step=1, checkpoint_id="mine")
    assert world.run.saved("mine") is None
    world.ack(trainer, second.batch_id, step=2, checkpoint_id="mine")
    assert world.run.saved("mine").policies[0].step == 2
    world.leave(trainer)
    world.register(checkpoint_id="mine", last_step=2)
    assert world.policy().step == 2


def test_a_stream_that_opens_again_has_the_order_again(world):
    trainer, node = world.started()
    ask(world)
    world.open_stream(trainer)
    assert world.save_orders == [(trainer, "mine")] * 2
    step(world, trainer, node, name="mine")
    world.open_stream(trainer)
    assert len(world.save_orders) == 2


def test_a_missing_trainer_is_named(make_world):
    world = make_world(policies=BOTH)
    (solver, verifier), node = world.started()
    ask(world)
    world.leave(verifier)
    with pytest.raises(AstraflowError, match="verifier has no trainer") as error:
        world.run.saved("mine")
    assert error.value.reason is Reason.NOT_READY
    refused(world, "mine", "other", reason=Reason.NOT_READY)
    step(world, solver, node, name="mine")
    successor = world.register("verifier")
    world.publish(successor, "verifier", step=0)
    world.open_stream(successor)
    assert world.save_orders[-1] == (successor, "mine")
    assert world.run.saved("mine") is None


def test_the_newest_order_counts(world):
    trainer, node = world.started()
    ask(world)
    ask(world, "other")
    with pytest.raises(AstraflowError, match="other was asked for after mine"):
        world.run.saved("mine")
    step(world, trainer, node, name="other")
    assert world.run.saved("other") is not None
    with pytest.raises(AstraflowError, match="checkpoint of another name was asked for after mine"):
        world.run.saved("mine")


def test_a_part_that_was_rolled_back_is_asked_for_again(make_world):
    world = make_world(policies=BOTH)
    (solver, verifier), node = world.started()
    ask(world)
    step(world, solver, node, name="mine")
    world.leave(solver)
    successor = world.register("solver")
    world.publish(successor, "solver", step=0)
    world.open_stream(successor)
    assert world.save_orders[-1] == (successor, "mine")
    step(world, verifier, node, "verifier", name="mine")
    assert world.run.saved("mine") is None


def test_weights_of_another_step_are_not_taken_for_it(world):
    trainer, node = world.started()
    ask(world)
    step(world, trainer, node, name="mine")
    step(world, trainer, node)
    world.leave(trainer)
    with pytest.raises(AstraflowError) as error:
        world.register(checkpoint_id="mine", last_step=2)
    assert error.value.reason is Reason.CHECKPOINT_UNKNOWN


@pytest.mark.parametrize("step_count", [None, 1])
def test_what_ends_before_a_trainer_has_saved_is_no_checkpoint_of_the_run(make_world, step_count):
    world = make_world(step_count=step_count)
    trainer, node = world.started()
    ask(world)
    header = step(world, trainer, node)
    world.apply(ev.RunStopped(mode=StopMode.CANCEL))
    assert world.run.saved("mine") is None
    if step_count is None:
        world.leave(trainer)
        with pytest.raises(AstraflowError, match="ended before its trainer had saved mine"):
            world.run.saved("mine")
    else:
        # It was written meanwhile.
        world.ack(trainer, header.batch_id, step=1, checkpoint_id="mine")
        assert world.run.saved("mine").policies[0].step == 1


def test_names_are_checked_and_a_run_that_is_over_is_not_saved(world):
    world.started()
    refused(world, "", "../mine", "step_000004", "x" * 101, reason=Reason.INVALID_FIELD)
    world.apply(ev.RunStopped(mode=StopMode.CANCEL))
    refused(world, "mine", reason=Reason.RUN_ENDED)
