import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.rollouts import Disposition, Outcome
from astraflow.core.tasks import CancelReason


@pytest.fixture
def world(make_world):
    return make_world()


def answer(ack):
    return ack.disposition, ack.reason


def test_rollout_is_accepted_once(world):
    _, node = world.started()
    task = world.pop_task(node)
    assert answer(world.send(node, task, 0)) == (Disposition.ACCEPTED, None)
    again = world.send(node, task, 0)
    assert answer(again) == (Disposition.DUPLICATE, Reason.DUPLICATE)
    assert world.account().duplicate_count == 1
    assert len(world.recorded) == 1


def test_rollout_of_a_settled_group_is_a_duplicate(world):
    trainer, node = world.started()
    tasks = list(world.tasks[node])
    world.work(node)
    world.train(trainer)
    assert answer(world.send(node, tasks[0], 0))[0] is Disposition.DUPLICATE


def test_rollout_that_nobody_asked_for_is_rejected(world, rollout_of):
    _, node = world.started()
    task = world.pop_task(node)
    versions = {"solver": (0,)}

    def send(rollout):
        return answer(world.apply(ev.RolloutArrived(member_id=node, rollout=rollout)))

    assert send(rollout_of(task, 9, versions=versions))[1] is Reason.ROLLOUT_INVALID
    assert send(rollout_of(task, 0, versions={"solver": (3,)}))[1] is Reason.VERSION_UNKNOWN
    assert send(rollout_of(task, 0, versions={"judge": (0,)}))[1] is Reason.POLICY_UNKNOWN
    assert world.account().waiting_count == 0


def test_rollout_for_a_task_of_another_member_is_not_taken(world):
    _, node = world.started()
    liar = world.join("liar", credit=0)
    world.report(liar, 0)
    task = world.pop_task(node)
    assert answer(world.send(liar, task, 0)) == (Disposition.DROPPED, Reason.TASK_UNKNOWN)
    assert answer(world.send(node, task, 0))[0] is Disposition.ACCEPTED


def test_rejected_rollout_is_asked_for_again(world, rollout_of):
    _, node = world.started(credit=2)
    task = world.pop_task(node)
    unsound = rollout_of(task, 0, versions={"solver": (3,)})
    world.apply(ev.RolloutArrived(member_id=node, rollout=unsound))
    world.send(node, task, 1)
    world.finish(node, task)
    assert world.pop_task(node).sample_indexes == (0,)


def test_result_closes_a_task_once(world, rollout_of):
    _, node = world.started()
    task = world.pop_task(node)
    for index in task.sample_indexes:
        world.send(node, task, index)
    assert answer(world.finish(node, task)) == (Disposition.ACCEPTED, None)
    assert answer(world.finish(node, task)) == (Disposition.DUPLICATE, Reason.DUPLICATE)


def test_result_of_a_foreign_task_is_rejected(world):
    _, node = world.started()
    task = world.pop_task(node)
    foreign = type(task)(
        **{name: getattr(task, name) for name in task.__slots__ if name != "task_id"},
        task_id="task-other-0",
    )
    assert answer(world.finish(node, foreign)) == (Disposition.REJECTED, Reason.TASK_UNKNOWN)


def test_task_given_back_goes_elsewhere(world):
    _, node = world.started(credit=2)
    task = world.pop_task(node)
    other = world.join("other", credit=2)
    world.report(other, 0)
    world.tasks[other].clear()
    world.credit(node, 0)
    failure = Failure(reason=Reason.CAPACITY_EXCEEDED)
    world.apply(ev.TaskNacked(member_id=node, task_id=task.task_id, failure=failure))
    world.credit(other, 4)
    assert world.tasks[other][-1].group_id == task.group_id


def test_nack_of_a_draining_node_keeps_new_work_from_it(world):
    _, node = world.started(credit=4)
    tasks = list(world.tasks[node])
    world.tasks[node].clear()
    failure = Failure(reason=Reason.MEMBER_DRAINING)
    for task in tasks:
        world.apply(ev.TaskNacked(member_id=node, task_id=task.task_id, failure=failure))
    assert not world.tasks[node]
    assert world.account().is_balanced


def test_what_a_dead_node_held_is_issued_again(world):
    _, node = world.started(credit=4)
    task = world.pop_task(node)
    world.send(node, task, 0)
    other = world.join("other", credit=8)
    world.report(other, 0)
    held = {t.group_id for t in world.tasks[node]} | {task.group_id}
    world.clock.advance(9)
    world.keep_alive(other)
    world.tick(2)
    again = [t for t in world.tasks[other] if t.attempt]
    assert {t.group_id for t in again} == held
    assert [t.sample_indexes for t in again if t.group_id == task.group_id] == [(1,)]
    with pytest.raises(AstraflowError, match="SESSION_ENDED"):
        world.apply(ev.TaskCredit(member_id=node, max_outstanding=1))


def test_task_that_takes_too_long_is_issued_again_elsewhere(world):
    _, node = world.started(credit=2)
    task = world.pop_task(node)
    other = world.join("other", credit=100)
    world.report(other, 0)
    world.tasks[other].clear()
    for _ in range(60):
        world.clock.advance(5)
        for member in (node, other):
            world.keep_alive(member)
        if world.run.next_deadline <= world.clock.now():
            world.tick()
    cancel = world.cancelled[0]
    assert (cancel.task_id, cancel.reason) == (task.task_id, CancelReason.DEADLINE)
    again = next(t for t in world.tasks[other] if t.group_id == task.group_id)
    # Both answer: the first counts, and the slow one had its credit taken all along.
    assert answer(world.send(node, task, 0))[0] is Disposition.ACCEPTED
    assert answer(world.send(other, again, 0))[0] is Disposition.DUPLICATE


def test_a_task_that_ran_out_while_no_hub_was_there_is_no_failed_attempt(make_world):
    world = make_world(max_attempts=1, group_size=1)
    _, node = world.started(credit=1)
    task = world.pop_task(node)
    world.clock.advance(3600)
    world.apply(ev.HubRestarted())
    world.tick()
    assert world.cancelled[0].task_id == task.task_id
    assert not world.account().drops
    assert answer(world.send(node, task, 0))[0] is Disposition.ACCEPTED


def test_returned_rollouts_are_not_failed_attempts(make_world):
    world = make_world(max_attempts=1, group_size=1)
    _, node = world.started(credit=1)
    for attempt in range(3):
        task = world.pop_task(node)
        assert (task.group_id, task.attempt) == ("group-r-0", attempt)
        world.send(node, task, 0, outcome=Outcome.RETURNED)
        world.finish(node, task)
    assert not world.account().drops


def test_listed_rollouts_say_what_became_of_them(make_world):
    world = make_world(groups_per_batch=1, max_staleness=0)
    trainer, node = world.started()
    world.work(node)
    places = [p.place for record in world.run.rollouts() for p in record.placements]
    assert places == ["leased", "leased"]
    header = world.train(trainer)
    (placement,) = world.run.rollouts()[-1].placements
    assert (placement.place, placement.batch_id) == ("trained", header.batch_id)
    assert (placement.step, placement.staleness, placement.use_count) == (1, 0, 1)
