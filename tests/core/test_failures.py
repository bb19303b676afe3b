from dataclasses import replace
from datetime import timedelta

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.status import RunState
from astraflow.core.work.failures import LEAST_COUNT, RECENT_COUNT, FailureLog

from .conftest import START, make_rollout

LATER = START + timedelta(seconds=9)


def bug(cause="KeyError at mine.py:3", *, traceback="", message="odd"):
    return Failure(reason=Reason.SCORER_FAILED, message=message, cause=cause, traceback=traceback)


def test_equal_failures_are_one_cause_with_the_newest_traceback():
    log = FailureLog()
    log.note(bug(traceback="here"), START)
    log.note(bug(message="again"), LATER)
    log.note(bug("ValueError at other.py:1"), LATER)
    first, second = log.report().causes
    assert (first.cause, first.count) == ("KeyError at mine.py:3", 2)
    assert (first.last.traceback, first.first_time, first.last_time) == ("here", START, LATER)
    assert (second.cause, second.count) == ("ValueError at other.py:1", 1)
    assert log.traceback_of("KeyError at mine.py:3") == "here"
    assert log.traceback_of("unknown") == ""


def test_failures_without_a_place_are_one_cause_by_their_message():
    log = FailureLog()
    for number in range(3):
        log.note(Failure(reason=Reason.ENGINE_FAILED, message=f"server {number} is gone"), START)
    assert [(c.cause, c.count) for c in log.report().causes] == [
        ("ENGINE_FAILED: server # is gone", 3)
    ]


def test_a_share_that_is_too_large_is_told_when_its_causes_are_forgotten():
    log = FailureLog()
    for number in range(LEAST_COUNT):
        log.finish(bug(f"cause {number}"), START)
    for number in range(64):
        log.note(Failure(reason=Reason.ENGINE_FAILED, cause=f"engine {number}"), START)
    assert log.unbearable(0.5).message.startswith("32 of the last 32 training rollouts failed")


@pytest.mark.parametrize("reason", [Reason.MEMBER_LOST, Reason.TASK_CANCELLED, Reason.TASK_EXPIRED])
def test_what_comes_and_goes_with_members_is_nobodys_bug(reason):
    log = FailureLog()
    for _ in range(RECENT_COUNT):
        log.finish(Failure(reason=reason), START)
    report = log.report()
    assert (report.finished_count, report.causes) == (0, ())
    assert log.unbearable(0.5) is None


def test_what_the_policy_broke_is_told_and_no_failure():
    log = FailureLog()
    for _ in range(RECENT_COUNT):
        log.finish(Failure(reason=Reason.POLICY_FAULT, cause="c"), START)
    report = log.report()
    assert (report.finished_count, report.failed_count, report.causes[0].count) == (128, 0, 128)
    assert log.unbearable(0.01) is None


def test_an_engine_that_fails_is_told_and_does_not_count():
    log = FailureLog()
    log.finish(Failure(reason=Reason.ENGINE_FAILED, message="gone"), START)
    report = log.report()
    assert (report.finished_count, len(report.causes)) == (0, 1)


def test_a_share_is_judged_once_enough_have_finished():
    log = FailureLog()
    for _ in range(LEAST_COUNT - 1):
        log.finish(bug(traceback="here"), START)
    assert log.unbearable(0.5) is None
    log.finish(bug(), START)
    failure = log.unbearable(0.5)
    assert "32 of the last 32" in failure.message
    assert "rollouts.max_failed_share (0.5)" in failure.message
    assert "seen 32 times" in failure.message
    assert (failure.cause, failure.traceback) == ("KeyError at mine.py:3", "here")
    assert log.unbearable(1.0) is None


def test_only_the_last_ones_count():
    log = FailureLog()
    for _ in range(LEAST_COUNT):
        log.finish(bug(), START)
    for _ in range(RECENT_COUNT):
        log.finish(None, START)
    report = log.report()
    assert (report.recent_count, report.recent_failed_count) == (RECENT_COUNT, 0)
    assert (report.failed_count, report.finished_count) == (LEAST_COUNT, LEAST_COUNT + RECENT_COUNT)
    assert report.failed_share == 0.2


def test_causes_are_bounded_and_the_frequent_ones_stay():
    log = FailureLog()
    for _ in range(3):
        log.note(bug("often"), START)
    for number in range(1000):
        log.note(bug(f"c{number}"), START)
    causes = log.report().causes
    assert causes[0].cause == "often"
    assert len(causes) == 16


def test_what_a_member_says_at_length_is_cut():
    log = FailureLog()
    log.note(bug("c" * 10**6, message="m" * 10**6, traceback="t" * 10**6 + "end"), START)
    (cause,) = log.report().causes
    assert len(cause.cause) == len(cause.last.message) == len(cause.last.traceback) == 4096
    assert cause.last.traceback.endswith("end")


def test_no_more_of_metadata_is_kept_than_ids_take():
    """16 causes of megabytes each were told with every status."""
    log = FailureLog()
    small, large = {"task_id": "t"}, {"a": "x" * 3000, "b": "x" * 3000}
    log.note(replace(bug(), metadata=small), START)
    assert log.report().causes[0].last.metadata == small
    log.note(replace(bug(), metadata=large), START)
    assert not log.report().causes[0].last.metadata


def fail_all(world, node, failure, count):
    """Let so many samples fail, all of a task at once."""
    while count > 0 and not world.state.is_final:
        task = world.pop_task(node)
        world.finish(node, task, failures=tuple((i, failure) for i in task.sample_indexes))
        count -= len(task.sample_indexes)


def test_a_run_of_which_too_much_fails_ends_with_the_worst_cause(make_world):
    world = make_world()
    _, node = world.started()
    fail_all(world, node, bug(traceback="here"), 2 * RECENT_COUNT)
    status = world.run.status(world.clock.now())
    assert status.state is RunState.FAILED
    assert (status.failure.reason, status.failure.traceback) == (Reason.SCORER_FAILED, "here")
    assert status.failures.failed_count == LEAST_COUNT


def test_a_recipe_may_let_it_go_on(make_world):
    world = make_world(max_failed_share=1.0, max_failed_groups=10**6)
    _, node = world.started()
    fail_all(world, node, bug(), RECENT_COUNT)
    assert world.state is RunState.RUNNING


def test_a_node_that_is_killed_is_no_failure_of_the_users(make_world):
    world = make_world()
    _, node = world.started()
    task = world.pop_task(node)
    world.send(node, task, 0)
    world.apply(ev.MemberLeft(member_id=node, message="killed"))
    report = world.run.status(world.clock.now()).failures
    assert (report.finished_count, report.failed_count, report.causes) == (1, 0, ())


def test_a_member_tells_of_what_belongs_to_no_rollout(make_world):
    world = make_world()
    _, node = world.started()
    world.apply(ev.FailureReported(member_id=node, failure=bug("Blocked at mine.py:7")))
    report = world.run.status(world.clock.now()).failures
    assert [each.cause for each in report.causes] == ["Blocked at mine.py:7"]
    assert report.finished_count == 0
    with pytest.raises(AstraflowError) as caught:
        world.apply(ev.FailureReported(member_id="nobody", failure=bug()))
    assert caught.value.reason is Reason.SESSION_ENDED


def test_what_the_policy_broke_is_trained_on(make_world):
    world = make_world(groups_per_batch=1)
    trainer, node = world.started()
    task = world.pop_task(node)
    world.send(node, task, 0)
    broken = replace(
        make_rollout(task, 1, versions={"solver": (0,)}),
        outcome=Outcome.POLICY_FAULT,
        reward=-1.0,
        failure=Failure(reason=Reason.POLICY_FAULT, message="its program hangs"),
    )
    world.apply(ev.RolloutArrived(member_id=node, rollout=broken))
    world.finish(node, task)
    header, _ = world.pop_batch(trainer)
    assert header.row_count == 2
    assert not world.account().drops
