from astraflow.core import events as ev
from astraflow.core.errors import Failure, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.settings import PlugInSpec
from astraflow.core.status import RunState

ENGINE = Failure(reason=Reason.ENGINE_FAILED, message="broken")


def open_tasks(world, node):
    return world.tasks.get(node, [])


def test_open_groups_are_bounded_by_staleness(make_world):
    world = make_world(groups_per_batch=2, max_staleness=2)
    _, node = world.started(credit=100)
    assert len(open_tasks(world, node)) == 6
    assert world.policy().max_open_group_count == 6


def test_weights_that_are_published_again_make_no_sample_older(make_world):
    world = make_world(groups_per_batch=1, max_staleness=1)
    trainer, node = world.started(credit=100)
    world.work(node)
    for version in (1, 2, 3):
        world.publish(trainer, step=0, digest=b"solver0")
        world.report(node, version)
    assert world.train(trainer).version == 0
    assert world.train(trainer).version == 4
    assert world.policy().staleness_counts == {0: 2, 1: 2}
    assert not world.account().drops


def test_a_node_may_sample_from_weights_that_were_published_again(make_world):
    world = make_world(groups_per_batch=1, max_staleness=0)
    trainer, node = world.started(credit=100)
    world.publish(trainer, step=0, digest=b"solver0")
    world.work(node)
    assert world.train(trainer).version == 1
    world.report(node, 2)
    assert world.tasks[node][0].versions["solver"].min == 2


def test_no_more_groups_are_begun_than_steps_can_use(make_world):
    world = make_world(groups_per_batch=2, max_staleness=2, step_count=2)
    _, node = world.started(credit=100)
    assert len(open_tasks(world, node)) == 4


def test_task_asks_for_a_whole_group_and_its_versions(make_world):
    world = make_world(groups_per_batch=2, max_staleness=1, group_size=4)
    _, node = world.started(credit=100)
    tasks = open_tasks(world, node)
    assert [task.sample_indexes for task in tasks] == [(0, 1, 2, 3)] * 4
    assert [task.versions["solver"].min for task in tasks] == [0, 0, 0, 0]
    assert {task.sampling["solver"].seed for task in tasks} == {0}
    assert [task.prompt.prompt_id for task in tasks] == ["p0", "p1", "p2", "p3"]


def test_work_issued_late_must_be_sampled_from_newer_versions(make_world):
    world = make_world(groups_per_batch=2, max_staleness=1)
    trainer, node = world.started(credit=100)
    world.work(node, 2)
    world.train(trainer)
    # Version 1 is out; two groups wait and make the next batch, which trains on version 1. What
    # is issued now is trained on after it, on version 2, and may be one version older.
    assert [task.versions["solver"].min for task in open_tasks(world, node)[-2:]] == [1, 1]


def test_dropped_groups_are_replaced_by_ones_that_wait_for_no_batch(make_world):
    filters = (PlugInSpec(name="zero_advantage"),)
    world = make_world(max_staleness=0, steps_per_version=2, filters=filters)
    trainer, node = world.started(credit=100)

    def work(count, *rewards):
        for task in [world.pop_task(node) for _ in range(count)]:
            for index, reward in enumerate(rewards):
                world.send(node, task, index, reward=reward)

    work(2, 0.0, 1.0)
    world.ack(trainer, world.pop_batch(trainer)[0].batch_id, step=1)
    # Version 1 takes one more batch, and nothing is left of what was asked for it.
    work(2, 1.0, 1.0)
    assert [task.versions["solver"].min for task in open_tasks(world, node)] == [0, 0]
    work(2, 0.0, 1.0)
    world.train(trainer)
    assert world.policy().version == 1
    assert [task.versions["solver"].min for task in open_tasks(world, node)] == [1, 1, 1, 1]


def test_credit_is_never_exceeded_and_counts_unanswered_samples(make_world):
    world = make_world(groups_per_batch=4, group_size=2)
    _, node = world.started(credit=4)
    assert len(open_tasks(world, node)) == 2
    task = world.pop_task(node)
    world.send(node, task, 0)
    assert len(open_tasks(world, node)) == 1
    world.send(node, task, 1)
    assert len(open_tasks(world, node)) == 2


def test_group_is_split_when_no_node_can_take_it_whole(make_world):
    world = make_world(group_size=4)
    _, node = world.started(credit=3)
    assert [task.sample_indexes for task in open_tasks(world, node)] == [(0, 1, 2)]
    other = world.join("other", credit=3)
    world.report(other, 0)
    first = open_tasks(world, other)[0]
    assert (first.sample_indexes, first.group_id) == ((3,), open_tasks(world, node)[0].group_id)


def test_failed_sample_is_issued_again_as_the_next_attempt(make_world):
    world = make_world()
    _, node = world.started(credit=2)
    task = world.pop_task(node)
    world.send(node, task, 0)
    world.send(node, task, 1, outcome=Outcome.INFRA_ERROR)
    world.finish(node, task)
    again = world.pop_task(node)
    assert (again.group_id, again.sample_indexes, again.attempt) == (task.group_id, (1,), 1)
    assert world.account().reissued_count == 1


def test_sample_that_fails_too_often_shrinks_its_group(make_world):
    world = make_world(max_attempts=2, groups_per_batch=1, max_staleness=0)
    trainer, node = world.started(credit=2)
    task = world.pop_task(node)
    world.send(node, task, 0)
    world.finish(node, task, failures=((1, ENGINE),))
    again = world.pop_task(node)
    world.finish(node, again, failures=((1, ENGINE),))
    header, _ = world.pop_batch(trainer)
    assert header.row_count == 1
    assert header.groups[0].sample_count == 2
    assert [(d.reason, d.count) for d in world.account().drops] == [(Reason.ENGINE_FAILED, 1)]


def test_group_that_shrank_too_far_is_dropped(make_world):
    world = make_world(max_attempts=1, min_group_size=2)
    _, node = world.started()
    task = world.pop_task(node)
    world.send(node, task, 0)
    world.finish(node, task, failures=((1, ENGINE),))
    drops = {drop.reason: drop.count for drop in world.account().drops}
    assert drops == {Reason.ENGINE_FAILED: 1, Reason.GROUP_INCOMPLETE: 1}
    assert world.account().is_balanced


def test_what_cannot_get_better_is_not_tried_again(make_world):
    world = make_world(max_attempts=3)
    _, node = world.started()
    task = world.pop_task(node)
    too_long = Failure(reason=Reason.CONTEXT_TOO_LONG, message="prompt of 99 tokens")
    world.finish(node, task, failures=((0, too_long), (1, too_long)))
    assert [(d.reason, d.count) for d in world.account().drops] == [(Reason.CONTEXT_TOO_LONG, 2)]
    letter = world.run.dead_letters()[0]
    assert letter.prompt.prompt_id == task.prompt.prompt_id
    assert [failure.message for failure in letter.failures] == ["prompt of 99 tokens"] * 2


def test_run_fails_when_group_after_group_fails(make_world):
    world = make_world(max_attempts=1, max_failed_groups=3)
    _, node = world.started()
    while not world.state.is_final:
        task = world.pop_task(node)
        world.finish(node, task, failures=((0, ENGINE), (1, ENGINE)))
    status = world.run.status(world.clock.now())
    assert status.state is RunState.FAILED
    assert status.failure.reason is Reason.ENGINE_FAILED
    assert "3 groups in a row" in status.failure.message
    assert status.dead_letter_count == 3


def test_one_good_rollout_ends_the_row_of_failures(make_world):
    world = make_world(max_attempts=1, max_failed_groups=2)
    _trainer, node = world.started()
    for is_good in (False, True, False, True, False):
        task = world.pop_task(node)
        if is_good:
            world.send(node, task, 0)
        world.finish(node, task, failures=((0, ENGINE), (1, ENGINE))[is_good:])
    assert world.state is RunState.RUNNING


def test_scorer_that_failed_costs_the_sample_and_is_no_reward(make_world):
    world = make_world(groups_per_batch=1)
    trainer, node = world.started()
    task = world.pop_task(node)
    world.send(node, task, 0, outcome=Outcome.SCORER_FAILED)
    world.send(node, task, 1, reward=0.0)
    world.finish(node, task)
    assert world.pop_batch(trainer)[0].row_count == 1
    assert world.account().drops[0].reason is Reason.ENGINE_FAILED


def test_paused_run_issues_nothing_until_it_is_resumed(make_world):
    world = make_world()
    world.apply(ev.RunPaused())
    _, node = world.started()
    assert world.state is RunState.PAUSED
    assert not open_tasks(world, node)
    world.apply(ev.RunResumed())
    assert open_tasks(world, node)


def test_policies_share_a_rollout_and_train_on_their_own_part(make_world):
    world = make_world(policies=("solver", "verifier"), groups_per_batch=1, max_staleness=0)
    (solver, verifier), node = world.started()
    task = world.pop_task(node)
    world.send(node, task, 0)
    world.send(node, task, 1, versions={"solver": (0, 0)})
    world.finish(node, task)
    assert world.pop_batch(solver)[0].row_count == 2
    assert world.pop_batch(verifier)[0].row_count == 1
    drop = world.account("verifier").drops[0]
    assert (drop.reason, drop.filter, drop.count) == (Reason.FILTERED, "no_trajectory", 1)
    assert all(account.is_balanced for account in world.run.accounts())


def test_tasks_wait_for_every_policy_of_the_workflow(make_world):
    world = make_world(policies=("solver", "verifier"))
    for policy in world.policies:
        world.publish(world.register(policy), policy)
    node = world.join()
    world.report(node, 0, "solver")
    assert not open_tasks(world, node)
    world.report(node, 0, "verifier")
    assert open_tasks(world, node)


def test_passes_over_the_data_are_counted(make_world):
    world = make_world(prompt_count=2)
    _trainer, _node = world.started()
    assert world.run.status(world.clock.now()).epochs == {"train": 1}


def two_nodes(world, *, credit=16):
    _, first = world.started(credit=credit)
    second = world.join("second", credit=credit)
    world.report(second, 0)
    return first, second


def test_group_is_spread_when_it_need_not_stay_together(make_world):
    world = make_world(group_size=4, keeps_together=False, max_staleness=0)
    trainer = world.register()
    world.publish(trainer)
    world.open_stream(trainer)
    nodes = [world.join(name, credit=8) for name in "ab"]
    for node in nodes:
        world.apply(ev.TaskCredit(member_id=node, max_outstanding=0))
        world.report(node, 0)
    world.apply(ev.RunPaused())
    for node in nodes:
        world.credit(node, 8)
    world.apply(ev.RunResumed())
    for node in nodes:
        assert sum(len(task.sample_indexes) for task in world.tasks[node]) == 4
        assert len({task.group_id for task in world.tasks[node]}) == 2


def test_fast_node_gets_more_than_a_slow_one(make_world):
    """Two seconds a rollout against half a second: by what was accepted, not by what was said."""
    world = make_world(group_size=2, groups_per_batch=4, max_staleness=1)
    slow, fast = two_nodes(world, credit=32)
    trainer = world.run.status(world.clock.now()).members[0].member_id
    done = {slow: 0, fast: 0}
    for turn in range(120):
        world.clock.advance(0.5)
        done[fast] += world.work(fast)
        if turn % 4 == 3:
            done[slow] += world.work(slow, 4)
        if world.batches.get((trainer, 0)):
            world.train(trainer)
            for node in (slow, fast):
                world.report(node, world.policy().version)
        for member in (slow, fast, trainer):
            world.keep_alive(member)
    assert done[fast] > 2 * done[slow]
