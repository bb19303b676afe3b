"""Prompts that kill, rollouts that come late, and letters that are issued again."""

from dataclasses import replace

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.rollouts import Disposition

ENGINE = Failure(reason=Reason.ENGINE_FAILED, message="broken")


def kill(world, member):
    """Let a node fall silent; everybody else goes on."""
    for _ in range(11):
        world.clock.advance(1)
        for other in world.run.status(world.clock.now()).members:
            if other.member_id != member:
                world.keep_alive(other.member_id)
        world.tick()
    world.tasks.pop(member, None)


def test_rollout_of_a_node_that_came_back_late_is_used(make_world):
    world = make_world()
    _, first = world.started(credit=2)
    task = world.pop_task(first)
    kill(world, first)
    second = world.join("second", credit=2)
    world.report(second, 0)
    again = world.pop_task(second)
    assert again.group_id == task.group_id
    world.join("first", resumes=first, credit=2)
    assert world.send(second, again, 0).disposition is Disposition.ACCEPTED
    late = world.send(first, task, 1, versions={"solver": (0,)})
    assert late.disposition is Disposition.ACCEPTED
    assert [(c.task_id, c.sample_indexes) for c in world.cancelled] == [(again.task_id, (1,))]
    twice = world.send(second, again, 1, name="other")
    assert twice.disposition is Disposition.DUPLICATE
    assert world.send(first, task, 1, versions={"solver": (0,)}).disposition == "duplicate"
    world.finish(second, again)
    assert world.account().is_balanced
    assert world.policy().fresh_count == 2


def test_late_rollout_of_somebody_else_is_not_taken(make_world):
    world = make_world()
    _, first = world.started(credit=2)
    task = world.pop_task(first)
    kill(world, first)
    second = world.join("second", credit=2)
    world.report(second, 0)
    assert world.send(second, task, 0).disposition is Disposition.DROPPED


def poisoned_world(make_world, poison="p0", **more):
    """Whoever holds the poisoned prompt dies; everybody else works; nodes come back as new ones."""
    world = make_world(max_lost=3, max_staleness=0, **more)
    trainer, node = world.started(credit=16)
    nodes, lives = [node], 1
    for _ in range(40):
        for node in list(nodes):
            held = {task.prompt.prompt_id for task in world.tasks.get(node, [])}
            if poison in held:
                kill(world, node)
                nodes.remove(node)
            else:
                world.work(node)
        while len(nodes) < 2 and not world.run.dead_letters():
            nodes.append(world.join(f"node{lives}", credit=16))
            lives += 1
            world.report(nodes[-1], world.policy().version)
        if world.run.dead_letters():
            break
    return world, trainer


def test_prompt_that_kills_is_given_up_and_takes_no_other_with_it(make_world):
    world, _ = poisoned_world(make_world, groups_per_batch=4)
    (letter,) = world.run.dead_letters()
    assert letter.prompt.prompt_id == "p0"
    *lost, last = letter.failures
    assert {failure.reason for failure in lost} == {Reason.MEMBER_LOST, Reason.PROMPT_POISONED}
    assert last.reason is Reason.PROMPT_POISONED
    assert "3 members were lost while they held samples of prompt p0" in last.message
    drops = {drop.reason: drop.count for drop in world.account().drops}
    assert drops == {Reason.PROMPT_POISONED: 2}
    assert world.run.status(world.clock.now()).dead_letter_count == 1
    assert world.account().is_balanced


def test_nodes_that_are_lost_use_up_no_attempt(make_world):
    world = make_world(max_attempts=2, groups_per_batch=1, max_staleness=0)
    _, node = world.started(credit=2)
    for life in range(5):
        kill(world, node)
        node = world.join(f"node{life}", credit=2)
        world.report(node, 0)
    for _ in range(2):
        task = world.pop_task(node)
        assert task.prompt.prompt_id == "p0"
        world.finish(node, task, failures=[(0, ENGINE), (1, ENGINE)])
    assert [letter.attempt_count for letter in world.run.dead_letters()] == [7]
    drops = {drop.reason: drop.count for drop in world.account().drops}
    assert drops == {Reason.ENGINE_FAILED: 2}


def test_what_waits_of_a_prompt_that_kills_is_not_issued_any_more(make_world):
    world = make_world(
        max_lost=2, group_size=3, groups_per_batch=1, max_staleness=0, keeps_together=False
    )
    _, first = world.started(credit=1)
    second = world.join("second", credit=1)
    world.report(second, 0)
    for node in (first, second):
        world.pop_task(node)
    kill(world, first)
    kill(world, second)
    third = world.join("third", credit=3)
    world.report(third, 0)
    assert {task.prompt.prompt_id for task in world.tasks[third]} == {"p1"}
    (letter,) = world.run.dead_letters()
    assert letter.prompt.prompt_id == "p0"
    assert world.account().is_balanced


def test_one_node_is_one_loss_however_many_tasks_of_a_group_it_held(make_world):
    world = make_world(
        max_lost=2, group_size=4, groups_per_batch=1, max_staleness=0, keeps_together=False
    )
    _, first = world.started(credit=4)
    assert {task.prompt.prompt_id for task in world.tasks[first]} == {"p0"}
    kill(world, first)
    assert not world.run.dead_letters()
    second = world.join("second", credit=4)
    world.report(second, 0)
    world.work(second)
    assert world.account().leased_count == 4


def fail_all(world, node, prompt_id, *, failure=ENGINE):
    """Fail every attempt of one prompt and answer all else."""
    for _ in range(12):
        for task in list(world.tasks.get(node, [])):
            world.tasks[node].remove(task)
            if task.prompt.prompt_id == prompt_id:
                world.finish(node, task, failures=[(i, failure) for i in task.sample_indexes])
            else:
                for index in task.sample_indexes:
                    world.send(node, task, index)
                world.finish(node, task)


def test_dead_letter_is_issued_again_on_request(make_world):
    world = make_world(max_staleness=0)
    trainer, node = world.started()
    fail_all(world, node, "p0")
    assert [letter.prompt.prompt_id for letter in world.run.dead_letters()] == ["p0"]
    world.apply(ev.PromptRequeued(prompt_id="p0"))
    world.apply(ev.PromptRequeued(prompt_id="p0"))
    assert not world.run.dead_letters()
    world.train(trainer)
    world.report(node, 1)
    assert world.tasks[node][0].prompt.prompt_id == "p0"


def test_a_dead_letter_keeps_no_more_of_a_failure_than_a_node_may_send(make_world):
    world = make_world()
    _, node = world.started()
    failure = replace(ENGINE, message="m" * (1 << 20), traceback="t" * (1 << 20) + "end")
    fail_all(world, node, "p0", failure=failure)
    (letter,) = world.run.dead_letters()
    assert {(len(each.message), len(each.traceback)) for each in letter.failures} == {(4096, 4096)}
    assert letter.failures[0].traceback.endswith("end")


def test_what_is_no_dead_letter_cannot_be_issued_again(make_world):
    world = make_world()
    world.started()
    with pytest.raises(AstraflowError) as caught:
        world.apply(ev.PromptRequeued(prompt_id="p99"))
    assert caught.value.reason is Reason.PROMPT_UNKNOWN


def test_dead_letter_is_not_issued_in_the_next_epoch(make_world):
    world = make_world(max_staleness=0, groups_per_batch=1)
    trainer, node = world.started()
    fail_all(world, node, "p0")
    world.drawn["train"] = 0
    seen = set()
    for _ in range(30):
        seen |= {task.prompt.prompt_id for task in world.tasks.get(node, [])}
        world.work(node)
        if world.batches.get((trainer, 0)):
            world.train(trainer)
        world.report(node, world.policy().version)
    assert "p1" in seen
    assert "p0" not in seen
