from dataclasses import replace

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evals import EvalState
from astraflow.core.rollouts import Disposition, Outcome
from astraflow.core.status import RunState
from astraflow.core.tasks import TaskPurpose, VersionRange

ENGINE = Failure(reason=Reason.ENGINE_FAILED, message="broken")


def purposes(world, node):
    return [task.purpose for task in world.tasks.get(node, [])]


def create(world, request_id="a", **more):
    return world.apply(ev.EvalCreated(request_id=request_id, suite="main", **more))


@pytest.fixture
def world(make_world, suite):
    return make_world(suites=(suite(at_start=False, at_end=False),), eval_prompt_count=4)


def test_first_version_is_measured_before_training_begins(make_world, suite):
    world = make_world(suites=(suite(),), eval_prompt_count=3)
    _, node = world.started(credit=8)
    assert purposes(world, node)[:3] == [TaskPurpose.EVAL] * 3
    task = world.tasks[node][0]
    assert task.versions == {"solver": VersionRange(min=0, max=0)}
    assert (task.eval_run_id, task.priority) == (next(iter(world.evals)), 1)


def test_rows_that_come_in_pieces_are_asked_once_though_the_hub_restarts_between(world):
    _, node = world.started(credit=8)
    world.work(node)
    world.tasks[node].clear()
    world.reads_late = True
    asked = create(world)
    [whole] = world.late
    halves = [
        {name: rows[half] for name, rows in whole.prompts.items()}
        for half in (slice(2), slice(2, 4))
    ]
    world.apply(replace(whole, prompts=halves[0], goes_on=True))
    assert TaskPurpose.EVAL not in purposes(world, node)
    world.apply(ev.HubRestarted())
    world.apply(replace(whole, prompts=halves[0], goes_on=True))
    world.apply(replace(whole, prompts=halves[1]))
    assert world.run.eval_run(asked.eval_run_id).rollout_count == 4
    evals = [each for each in world.tasks[node] if each.purpose is TaskPurpose.EVAL]
    assert {each.prompt.prompt_id for each in evals} <= {"e0", "e1", "e2", "e3"}


def test_evaluation_takes_its_share_and_training_goes_on(world):
    _, node = world.started(credit=8)
    world.work(node)
    world.credit(node, 4)
    world.tasks[node].clear()
    create(world)
    assert purposes(world, node).count(TaskPurpose.EVAL) == 2


def test_evaluation_that_fits_beyond_the_credit_costs_training_no_room(world):
    _, node = world.started(credit=4)
    world.credit(node, 4, max_eval_extra=2)
    create(world)
    out = [len(task.sample_indexes) for task in world.tasks[node]]
    assert sum(out) == 4 + 2
    assert purposes(world, node)[-2:] == [TaskPurpose.EVAL] * 2
    world.work(node, 1)
    assert purposes(world, node).count(TaskPurpose.TRAIN) == len(out) - 2


def test_node_that_pauses_gets_no_evaluation_either(world):
    _, node = world.started(credit=8)
    world.credit(node, 0, max_eval_extra=2)
    world.tasks[node].clear()
    create(world)
    assert not purposes(world, node)


def test_result_is_the_share_of_correct_rollouts(world):
    _, node = world.started()
    world.work(node)
    run = create(world)
    for reward in (1.0, 1.0, 0.0, 1.0):
        world.work(node, 1, reward=reward)
    run = world.run.eval_run(run.eval_run_id)
    assert run.state is EvalState.SUCCEEDED
    assert (run.rollout_count, run.scored_count, run.missing_count) == (4, 4, 0)
    assert run.overall.avg_at_k == run.results[0].mean_reward == 0.75
    assert run == world.evals[run.eval_run_id]


def test_evaluation_enters_no_buffer_and_no_books(world):
    _, node = world.started()
    world.work(node)
    before = world.account()
    create(world)
    world.work(node)
    assert world.account() == before
    assert [r.purpose for r in world.recorded[-4:]] == [TaskPurpose.EVAL] * 4


def test_failed_rollouts_are_tried_again_then_missing(make_world, suite):
    world = make_world(
        suites=(suite(at_start=False, at_end=False),), eval_prompt_count=2, max_attempts=2
    )
    _, node = world.started()
    world.work(node)
    run = create(world)
    world.work(node, 1)
    for _ in range(2):
        task = world.pop_task(node)
        world.finish(node, task, failures=((0, ENGINE),))
    run = world.run.eval_run(run.eval_run_id)
    assert (run.state, run.scored_count, run.missing_count) == (EvalState.SUCCEEDED, 1, 1)
    assert run.overall.avg_at_k == 1.0


def test_evaluation_without_any_score_failed(world):
    _, node = world.started()
    world.work(node)
    run = create(world)
    while purposes(world, node):
        world.work(node, 1, outcome=Outcome.SCORER_FAILED)
    run = world.run.eval_run(run.eval_run_id)
    assert (run.state, run.missing_count) == (EvalState.FAILED, 4)
    assert run.failure.reason is Reason.ENGINE_FAILED


def test_tokens_of_another_version_are_rejected(world):
    _, node = world.started()
    world.work(node)
    create(world)
    task = world.pop_task(node)
    world.publish("trainer-r-0")
    ack = world.send(node, task, 0, versions={"solver": (0, 1)})
    assert (ack.disposition, ack.reason) == (Disposition.REJECTED, Reason.VERSION_NOT_SERVED)


def test_every_so_many_versions_are_measured(make_world, suite):
    world = make_world(suites=(suite(at_start=False, at_end=False, every=2),))
    trainer, node = world.started()
    for _ in range(4):
        world.work(node)
        world.train(trainer)
        world.report(node, world.policy().version)
    assert [run.versions for run in world.evals.values()] == [{"solver": 2}, {"solver": 4}]


def test_last_version_is_measured_when_training_is_over(make_world, suite):
    world = make_world(suites=(suite(at_start=False),), step_count=1, eval_prompt_count=3)
    trainer, node = world.started(credit=4)
    world.work(node)
    world.train(trainer)
    assert not world.evals
    world.report(node, 1)
    # Training is over, so the whole credit is free for it.
    assert purposes(world, node) == [TaskPurpose.EVAL] * 3
    assert world.state is RunState.STOPPING
    world.work(node)
    assert world.state is RunState.DONE
    assert [run.versions for run in world.evals.values()] == [{"solver": 1}]


def test_kept_version_is_measured_while_training_moves_on(world):
    trainer, node = world.started(credit=4)
    world.work(node)
    create(world)
    world.train(trainer)
    world.report(node, 1)
    done = 0
    while done < 4:
        task = world.pop_task(node)
        done += task.purpose is TaskPurpose.EVAL
        for index in task.sample_indexes:
            world.send(node, task, index)
        world.finish(node, task)
    assert next(iter(world.evals.values())).state is EvalState.SUCCEEDED


def test_node_that_has_not_kept_the_version_is_not_asked_again(world):
    _trainer, node = world.started(credit=4)
    world.work(node)
    run = create(world)
    late = world.join("late", credit=4)
    world.report(late, 0)
    failure = Failure(reason=Reason.VERSION_NOT_SERVED)
    tasks = [t for t in world.tasks[late] if t.purpose is TaskPurpose.EVAL]
    assert tasks
    for task in tasks:
        world.apply(ev.TaskNacked(member_id=late, task_id=task.task_id, failure=failure))
    world.tasks[late].clear()
    world.work(node)
    assert TaskPurpose.EVAL not in purposes(world, late)
    assert world.run.eval_run(run.eval_run_id).state is EvalState.SUCCEEDED


def test_version_that_nobody_kept_fails_after_a_while(world):
    trainer, node = world.started(credit=4)
    world.work(node)
    run = create(world)
    world.leave(node)
    world.train(trainer)
    late = world.join("late", credit=4)
    world.report(late, 1)
    for _ in range(8):
        world.clock.advance(5)
        world.keep_alive(late)
        world.keep_alive(trainer)
        world.tick()
    run = world.run.eval_run(run.eval_run_id)
    assert (run.state, run.failure.reason) == (EvalState.FAILED, Reason.VERSION_NOT_SERVED)


def test_an_evaluation_that_is_served_again_waits_for_nothing(world):
    trainer, node = world.started(credit=16)
    world.work(node)
    run = create(world)
    world.leave(node)
    world.train(trainer)
    late = world.join("late")
    world.report(late, 1)
    assert world.run.eval_run(run.eval_run_id).failure is not None
    back = world.join("back")
    world.report(back, 0)
    assert TaskPurpose.EVAL in purposes(world, back)
    assert world.run.eval_run(run.eval_run_id).failure is None
    for _ in range(5):
        world.clock.advance(8)
        for member in (trainer, late, back):
            world.keep_alive(member)
        world.tick()
        assert world.run.next_deadline > world.clock.now()
    world.work(back)
    assert world.run.eval_run(run.eval_run_id).state is EvalState.SUCCEEDED


def test_version_that_nobody_has_does_not_hold_up_the_end(make_world, suite):
    world = make_world(suites=(suite(at_start=False, at_end=False),), step_count=2)
    trainer, node = world.started(credit=4)
    world.work(node)
    run = create(world)
    world.leave(node)
    late = world.join("late", credit=4)
    world.report(late, 0)
    world.apply(ev.EvalCancelled(eval_run_id=run.eval_run_id))
    world.publish(trainer, step=0)
    old = create(world, request_id="old", versions={"solver": 0})
    world.report(late, 1)
    other = world.join("other", credit=4)
    world.report(other, 1)
    world.leave(late)
    waiting = world.run.eval_run(old.eval_run_id)
    assert waiting.failure.reason is Reason.VERSION_NOT_SERVED
    for _ in range(6):
        world.work(other)
        if world.batches.get((trainer, 0)):
            world.train(trainer)
            world.report(other, world.policy().version)
    assert world.state is RunState.DONE
    assert world.run.eval_run(old.eval_run_id).state is EvalState.FAILED


def test_request_is_idempotent(world):
    _, _node = world.started()
    first = create(world)
    assert create(world).eval_run_id == first.eval_run_id
    with pytest.raises(AstraflowError, match="REQUEST_CONFLICT"):
        create(world, versions={"solver": 0})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"suite": "other"}, Reason.EVAL_UNKNOWN),
        ({"versions": {"solver": 9}}, Reason.VERSION_UNKNOWN),
        ({"versions": {"judge": 0}}, Reason.INVALID_FIELD),
        ({"pool_share": 0.0}, Reason.INVALID_FIELD),
        ({"request_id": ""}, Reason.INVALID_FIELD),
    ],
)
def test_what_cannot_be_measured_is_refused(world, changes, reason):
    world.started()
    with pytest.raises(AstraflowError) as caught:
        world.apply(ev.EvalCreated(**({"request_id": "a", "suite": "main"} | changes)))
    assert caught.value.reason is reason
    assert not world.evals


def test_cancelled_evaluation_withdraws_its_tasks(world):
    _, node = world.started()
    world.work(node)
    run = create(world)
    task = world.pop_task(node)
    run = world.apply(ev.EvalCancelled(eval_run_id=run.eval_run_id))
    assert run.state is EvalState.CANCELLED
    assert {cancel.reason for cancel in world.cancelled} == {"eval_cancelled"}
    assert world.send(node, task, 0).reason is Reason.TASK_CANCELLED
    assert world.finish(node, task).disposition is Disposition.ACCEPTED
    assert world.apply(ev.EvalCancelled(eval_run_id=run.eval_run_id)) == run


def test_an_evaluation_samples_in_its_own_way(make_world, suite):
    world = make_world(
        suites=(replace(suite(), sampling={"temperature": 0.0, "top_p": 0.9}),), eval_prompt_count=1
    )
    _, node = world.started(credit=8)
    asked = list(world.tasks[node])
    world.work(node)
    asked += world.tasks[node]
    knobs = {task.purpose: task.sampling["solver"] for task in asked}
    assert (knobs[TaskPurpose.EVAL].temperature, knobs[TaskPurpose.EVAL].top_p) == (0.0, 0.9)
    assert not knobs[TaskPurpose.TRAIN].reshaped_by
