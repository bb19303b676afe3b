from datetime import timedelta

import pytest

from astraflow.core import events as ev
from astraflow.core.batches import EndCause
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.members import DirectiveKind
from astraflow.core.settings import PlugInSpec
from astraflow.core.status import RunState, StopMode


@pytest.fixture
def world(make_world):
    return make_world()


def stop(world, mode, grace=None):
    world.apply(ev.RunStopped(mode=mode, grace=grace))


def test_trainer_may_leave_once_its_last_version_is_live_everywhere(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    other = world.join("other")
    world.report(other, 0)
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    assert (trainer, 0) not in world.ends
    world.report(other, 1)
    assert world.ends[trainer, 0].cause is EndCause.STEP_LIMIT


def test_node_that_never_updates_does_not_hold_up_the_end(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    for _ in range(6):
        world.clock.advance(5)
        world.keep_alive(node)
        world.keep_alive(trainer)
        world.tick()
    assert world.ends[trainer, 0].cause is EndCause.STEP_LIMIT
    assert world.state is RunState.DONE


def test_a_trainer_whose_last_weights_are_lost_is_told_that_the_data_has_ended(make_world):
    world = make_world(step_count=2)
    trainer, node = world.started()
    for is_published in (True, False):
        world.work(node)
        header, _ = world.pop_batch(trainer)
        if is_published:
            world.publish(trainer, step=1)
            world.report(node, 1)
        world.ack(trainer, header.batch_id)
    world.leave(trainer)
    trainer = world.register(last_step=1)
    with pytest.raises(AstraflowError, match=r"data has ended.* start from a checkpoint"):
        world.publish(trainer, step=1)


def test_trainer_that_reconnects_is_told_the_end_again(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    world.open_stream(trainer)
    assert world.ends[trainer, 0].batch_count == 1


def test_open_tasks_are_cancelled_when_nobody_trains_any_more(make_world):
    world = make_world(step_count=1, max_staleness=1, groups_per_batch=1)
    trainer, node = world.started()
    late = world.join("late", credit=0)
    world.report(late, 0)
    world.work(node)
    world.train(trainer)
    account = world.account()
    assert account.is_balanced
    assert account.in_flight_count + account.waiting_count + account.fresh_count == 0


def test_policies_end_one_by_one(make_world):
    world = make_world(policies=("solver", "verifier"), step_count=2, max_staleness=1)
    (solver, verifier), node = world.started()
    for _ in range(2):
        world.work(node)
        world.train(solver, "solver")
        world.report(node, world.policy("solver").version, "solver")
    assert (solver, 0) in world.ends
    assert world.state is RunState.RUNNING
    for _ in range(2):
        world.work(node)
        world.train(verifier, "verifier")
        world.report(node, world.policy("verifier").version, "verifier")
    assert (verifier, 0) in world.ends
    assert world.state is RunState.DONE
    assert all(account.is_balanced for account in world.run.accounts())


def test_drain_trains_on_what_is_out(world):
    trainer, node = world.started(credit=6)
    stop(world, StopMode.DRAIN)
    assert world.state is RunState.STOPPING
    while world.state is not RunState.DONE:
        world.work(node)
        world.train(trainer)
        world.report(node, world.policy().version)
    assert world.account().trained_count == 6
    assert world.ends[trainer, 0].cause is EndCause.STOPPED
    assert world.run.status(world.clock.now()).failure is None


def test_cancel_ends_at_once(world):
    trainer, node = world.started()
    task = world.pop_task(node)
    stop(world, StopMode.CANCEL)
    assert world.state is RunState.DONE
    assert world.ends[trainer, 0].cause is EndCause.STOPPED
    assert {cancel.reason for cancel in world.cancelled} == {"stop"}
    assert [d.directive.kind for d in world.directives] == [DirectiveKind.STOP] * 2
    assert world.send(node, task, 0).reason is Reason.TASK_CANCELLED
    assert world.account().is_balanced


def test_drain_becomes_a_cancel_when_its_grace_is_over(world):
    _trainer, _node = world.started()
    stop(world, StopMode.DRAIN, timedelta(seconds=5))
    world.tick(5)
    assert world.state is RunState.DONE


def test_second_stop_shortens_a_drain(world):
    world.started()
    stop(world, StopMode.DRAIN)
    stop(world, StopMode.CANCEL)
    assert world.state is RunState.DONE
    stop(world, StopMode.DRAIN)
    assert world.state is RunState.DONE


def test_drain_before_anybody_came_ends_the_run(world):
    stop(world, StopMode.DRAIN)
    assert world.state is RunState.DONE
    assert world.is_over


def test_a_paused_run_that_drains_issues_what_failed_again(world):
    trainer, node = world.started()
    world.apply(ev.RunPaused())
    failure = Failure(reason=Reason.ENGINE_FAILED)
    world.finish(node, world.pop_task(node), failures=((0, failure), (1, failure)))
    stop(world, StopMode.DRAIN)
    see_through(world, trainer, node)
    assert world.account().trained_count == 8


def test_broken_run_fails_and_says_why(world):
    _trainer, node = world.started()
    world.apply(ev.RunBroken(failure=Failure(reason=Reason.INTERNAL, message="no such file")))
    status = world.run.status(world.clock.now())
    assert (status.state, status.failure.message) == (RunState.FAILED, "no such file")
    assert world.directives[-1].directive.message == "no such file"
    assert world.keep_alive(node).directive.kind is DirectiveKind.STOP


def test_nobody_joins_a_run_that_is_over(world):
    stop(world, StopMode.CANCEL)
    for call in (world.join, world.register):
        with pytest.raises(AstraflowError, match="RUN_ENDED"):
            call()


def test_lease_that_ends_after_the_run_is_dropped(world):
    trainer, node = world.started()
    world.work(node)
    stop(world, StopMode.CANCEL)
    world.leave(trainer)
    account = world.account()
    assert account.is_balanced
    assert (account.leased_count, account.fresh_count) == (0, 0)


def reopen(world, step_count):
    world.is_over = False
    world.apply(ev.HubRestarted(step_counts={"solver": step_count}))


def see_through(world, trainer, node):
    """Work and train until the run is over, and everybody has left."""
    while world.state is not RunState.DONE:
        world.work(node)
        if world.batches.get((trainer, 0)):
            world.train(trainer)
            world.report(node, world.policy().version)
        world.tick(1)
    for member in (trainer, node):
        world.leave(member)


@pytest.mark.parametrize("mode", [None, StopMode.DRAIN, StopMode.CANCEL])
def test_a_run_that_ended_goes_on_for_more_steps(make_world, mode, suite):
    world = make_world(step_count=2, max_staleness=0, groups_per_batch=1, suites=(suite(every=9),))
    trainer, node = world.started()
    if mode is not None:
        stop(world, mode)
    see_through(world, trainer, node)
    assert world.is_over
    step = world.policy().step

    reopen(world, step + 2)
    assert world.state is RunState.WAITING
    trainer = world.register(last_step=step)
    world.publish(trainer, step=step)
    world.open_stream(trainer)
    node = world.join()
    world.report(node, world.policy().version)
    see_through(world, trainer, node)
    assert world.policy().step == step + 2
    assert world.ends[trainer, 0].cause is EndCause.STEP_LIMIT
    assert world.account().is_balanced
    assert world.is_over


def test_a_run_with_nothing_left_to_do_stays_over(make_world):
    world = make_world(step_count=1)
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    assert world.state is RunState.DONE
    with pytest.raises(AstraflowError, match="every policy has done its steps") as caught:
        reopen(world, 1)
    assert caught.value.reason is Reason.RUN_ENDED
    assert world.state is RunState.DONE


def test_a_run_that_died_in_its_last_evaluation_goes_on_with_it(make_world, suite):
    world = make_world(step_count=1, suites=(suite(at_start=False),))
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.report(node, 1)
    assert world.state is RunState.STOPPING
    reopen(world, 1)
    assert world.state is RunState.STOPPING
    while world.state is not RunState.DONE:
        world.work(node)
        world.tick(1)


def test_a_run_that_failed_goes_on(world):
    world.started()
    world.apply(ev.RunBroken(failure=Failure(reason=Reason.INTERNAL, message="no such file")))
    assert world.state is RunState.FAILED
    reopen(world, 0)
    assert world.state is RunState.RUNNING
    assert world.run.status(world.clock.now()).failure is None


def fail_all(world, node, count):
    failure = Failure(reason=Reason.ENVIRONMENT_FAILED, message="no sandbox")
    for _ in range(count):
        task = world.pop_task(node)
        world.finish(node, task, failures=((0, failure),))


def drop_all(world, node, count):
    world.work(node, count)


def break_algorithm(world, _node, count):
    if count > 1:
        world.run._components.faults.note("filter mine", "KeyError")
    world.tick()


@pytest.mark.parametrize(
    ("fail", "count", "settings"),
    [
        (fail_all, 32, {}),
        (fail_all, 32, {"max_failed_share": 1.0, "max_attempts": 1}),
        (drop_all, 2, {"filters": (PlugInSpec(name="zero_advantage"),), "max_filtered_groups": 2}),
        (break_algorithm, 2, {}),
    ],
)
def test_what_failed_a_run_is_judged_anew_when_it_goes_on(make_world, fail, count, settings):
    world = make_world(group_size=1, **settings)
    _, node = world.started()
    fail(world, node, count)
    assert world.state is RunState.FAILED
    world.tasks.clear()
    reopen(world, 0)
    fail(world, node, 1)
    assert world.state is RunState.RUNNING
