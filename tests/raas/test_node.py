import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Capability, Directive, DirectiveKind
from astraflow.core.rollouts import Outcome
from astraflow.core.tasks import CancelReason, TaskCancellation, TaskPurpose
from astraflow.core.versions import VersionState
from astraflow.raas import policies
from astraflow.raas.node import NodeDeparture
from astraflow.wire.versions import encode_version_info
from astraflow_proto.dataflow.v1 import raas_service_pb2
from astraflow_proto.weights.v1 import version_service_pb2


async def test_a_node_says_what_it_is_when_it_joins(fake_hub, running):
    join = fake_hub.joins[0]
    assert (join.name, join.capacity) == ("raas-1", 8)
    assert join.contract.capabilities == {Capability.PIN_VERSION}
    assert [code.name for code in join.codes] == ["test_digits", "test_raises", "test_hangs"]
    assert [(p.policy_id, p.max_context_token_count) for p in join.policies] == [("solver", 64)]
    credit = fake_hub.credits[0]
    assert (credit.max_outstanding, credit.max_eval_outstanding) == (8, None)
    assert credit.max_eval_extra == 1


async def test_every_sample_comes_back_scored_and_then_the_result(fake_hub, running, make_task):
    fake_hub.issue(make_task(samples=4))
    await fake_hub.until(lambda: fake_hub.results)
    assert [kind for kind, _ in fake_hub.items] == ["rollout"] * 4 + ["result"]
    assert sorted(rollout.sample_index for rollout in fake_hub.rollouts) == [0, 1, 2, 3]
    for rollout in fake_hub.rollouts:
        assert rollout.outcome is Outcome.SCORED
        assert rollout.trajectories[0].tokens[:3].tolist() == [1, 2, 3]
        assert rollout.policy_versions == {"solver": 0}
    assert (fake_hub.results[0].rollout_count, fake_hub.results[0].failures) == (4, ())


async def test_samples_differ_and_another_attempt_repeats_them(fake_hub, running, make_task):
    fake_hub.issue(make_task(1, samples=2))
    await fake_hub.until(lambda: len(fake_hub.results) == 1)
    again = make_task(1, samples=2)
    object.__setattr__(again, "task_id", "task1-again")
    fake_hub.issue(again)
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    drawn = {}
    for rollout in fake_hub.rollouts:
        drawn.setdefault(rollout.sample_index, []).append(rollout.trajectories[0].tokens.tolist())
    assert drawn[0][0] == drawn[0][1]
    assert drawn[1][0] == drawn[1][1]
    assert drawn[0] != drawn[1]


async def test_rollouts_are_sent_again_until_they_are_acknowledged(fake_hub, running, make_task):
    fake_hub.acks_items = False
    fake_hub.issue(make_task(samples=2))
    await fake_hub.until(lambda: fake_hub.results)
    first = [rollout.rollout_id for rollout in fake_hub.rollouts]
    fake_hub.items.clear()
    fake_hub.acks_items = True
    fake_hub.cut("StreamRollouts")
    await fake_hub.until(lambda: fake_hub.results)
    assert [rollout.rollout_id for rollout in fake_hub.rollouts] == first


async def test_a_cut_task_stream_costs_nothing(fake_hub, running, engine, make_task):
    engine.open.clear()
    fake_hub.issue(make_task(1))
    await engine.until(lambda: engine.running == 2)
    fake_hub.cut("StreamTasks")
    await fake_hub.until(lambda: len(fake_hub.credits) == 2)
    assert fake_hub.joins[1].resume.held_task_ids == ("task1",)
    fake_hub.issue(make_task(2))
    engine.open.set()
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    assert {result.rollout_count for result in fake_hub.results} == {2}


async def test_an_ended_session_is_continued_with_what_is_held(
    fake_hub, running, engine, make_task
):
    engine.open.clear()
    fake_hub.issue(make_task(1))
    fake_hub.issue(make_task(2))
    await engine.until(lambda: engine.running == 4)
    fake_hub.held_task_ids = ("task2",)
    fake_hub.expire()
    fake_hub.cut("StreamTasks")
    await fake_hub.until(lambda: len(fake_hub.credits) == 2)
    assert set(fake_hub.joins[1].resume.held_task_ids) == {"task1", "task2"}
    assert fake_hub.joins[1].resume.incarnation == 1
    assert fake_hub.joins[1].policies[0].version == 0
    engine.open.set()
    await fake_hub.until(lambda: fake_hub.results)
    assert [result.task_id for result in fake_hub.results] == ["task2"]


async def test_a_hub_that_restarts_is_joined_again(fake_hub, running, make_task):
    await fake_hub.restart(forgets=True)
    await fake_hub.until(lambda: fake_hub.calls["StreamTasks open"] == 2)
    fake_hub.issue(make_task(1))
    await fake_hub.until(lambda: fake_hub.results)
    assert fake_hub.results[0].rollout_count == 2


async def test_what_a_later_release_says_of_a_version_is_left_out(
    fake_hub, running, engine, make_version
):
    later = version_service_pb2.WatchVersionsResponse(version=encode_version_info(make_version(1)))
    later.version.patches.add(version=1, profile=99, codec_version=9, root_digest=bytes(32))
    later.version.sources.add(kind=99, state=1, endpoint="h:1")
    later.version.sources.add(kind=1, state=99, endpoint="h:1")
    fake_hub.push("WatchVersions", later)
    told = asyncio.ensure_future(fake_hub.until(lambda: fake_hub.reports[-1].version == 1))
    await asyncio.wait({told, running}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    assert (fake_hub.reports[-1].state, engine.version) == (VersionState.LIVE, 1)


async def test_a_directive_of_a_later_release_is_passed_over(fake_hub, running, make_task):
    later = raas_service_pb2.StreamTasksResponse(directive={"kind": 99, "message": "hibernate"})
    fake_hub.push("StreamTasks", later)
    fake_hub.issue(make_task(samples=1))
    done = asyncio.ensure_future(fake_hub.until(lambda: fake_hub.results))
    await asyncio.wait({done, running}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()


async def test_a_workflow_that_raises_costs_its_rollouts_only(fake_hub, running, make_task):
    fake_hub.issue(make_task(1, workflow_id="raises", samples=1))
    fake_hub.issue(make_task(2, samples=1))
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    outcomes = {rollout.task_id: rollout for rollout in fake_hub.rollouts}
    assert outcomes["task1"].outcome is Outcome.INFRA_ERROR
    assert "no such tool" in outcomes["task1"].failure.message
    assert outcomes["task2"].outcome is Outcome.SCORED


async def test_a_workflow_that_never_ends_is_given_up(fake_hub, running, make_task):
    fake_hub.issue(make_task(1, workflow_id="hangs", samples=1, timeout_s=0.05))
    await fake_hub.until(lambda: fake_hub.results)
    assert fake_hub.rollouts[0].failure.reason is Reason.ROLLOUT_TIMEOUT


async def test_withdrawn_samples_fail_and_finished_ones_count(fake_hub, running, engine, make_task):
    fake_hub.issue(make_task(1, workflow_id="hangs", samples=3))
    fake_hub.withdraw(
        TaskCancellation(task_id="task1", reason=CancelReason.STALE, sample_indexes=(0, 1, 2))
    )
    await fake_hub.until(lambda: fake_hub.results)
    result = fake_hub.results[0]
    assert result.rollout_count == 0
    assert {failure.failure.reason for failure in result.failures} == {Reason.TASK_CANCELLED}


@pytest.mark.parametrize("left_s", [-1, 0.05])
async def test_a_task_ends_at_its_deadline_by_the_clock_of_the_run(
    fake_hub, running, make_task, left_s
):
    await fake_hub.until(lambda: fake_hub.loads)
    deadline = datetime.now(UTC) + timedelta(seconds=left_s)
    fake_hub.issue(make_task(1, workflow_id="hangs", samples=2, deadline=deadline))
    fake_hub.issue(make_task(2, samples=1, minimum=9, deadline=deadline))
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    failures = [each.failure for result in fake_hub.results for each in result.failures]
    assert {each.reason for each in failures} == {Reason.TASK_CANCELLED}
    assert len(failures) == 3
    assert all("deadline" in each.message for each in failures)


async def test_a_rollout_that_is_too_large_is_named_in_the_result(
    fake_hub, node, make_version, make_task
):
    fake_hub.max_message_nbytes = 64
    fake_hub.publish(make_version(0))
    async with asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await fake_hub.until(lambda: fake_hub.reports and fake_hub.credits)
        fake_hub.issue(make_task(1, samples=1))
        await fake_hub.until(lambda: fake_hub.results)
        node.stop()
    failure = fake_hub.results[0].failures[0].failure
    assert failure.reason is Reason.MESSAGE_TOO_LARGE


async def test_a_task_waits_for_its_version(fake_hub, running, make_task, make_version):
    fake_hub.issue(make_task(1, minimum=1))
    fake_hub.issue(make_task(2))
    await fake_hub.until(lambda: fake_hub.results)
    assert [result.task_id for result in fake_hub.results] == ["task2"]
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    newest = [rollout for rollout in fake_hub.rollouts if rollout.task_id == "task1"]
    assert {rollout.policy_versions["solver"] for rollout in newest} == {1}


async def test_an_evaluation_keeps_its_version_while_training_moves_on(
    fake_hub, running, engine, make_task, make_version
):
    engine.open.clear()
    fake_hub.issue(make_task(1, version=0, purpose=TaskPurpose.EVAL))
    await engine.until(lambda: engine.pins)
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 2)
    engine.open.set()
    await fake_hub.until(lambda: len(fake_hub.results) == 1)
    fake_hub.issue(make_task(2, version=0, purpose=TaskPurpose.EVAL))
    fake_hub.issue(make_task(3))
    await fake_hub.until(lambda: len(fake_hub.results) == 3)
    versions = {rollout.task_id: rollout.policy_versions["solver"] for rollout in fake_hub.rollouts}
    assert versions == {"task1": 0, "task2": 0, "task3": 1}


async def test_a_version_that_is_gone_is_given_back(fake_hub, running, make_task, make_version):
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 2)
    fake_hub.issue(make_task(1, version=0, purpose=TaskPurpose.EVAL))
    await fake_hub.until(lambda: fake_hub.nacks)
    assert fake_hub.nacks[0].task_id == "task1"
    assert fake_hub.nacks[0].failure.message.startswith("policy solver serves version 1 here")


async def test_a_version_that_nobody_announced_holds_no_other_back(
    fake_hub, running, engine, node, make_task, make_version
):
    fake_hub.issue(make_task(version=2, purpose=TaskPurpose.EVAL))
    while not node.runner.held:  # noqa: ASYNC110 - the hub's stream makes it true
        await asyncio.sleep(0.001)
    fake_hub.publish(make_version(3))
    await fake_hub.until(lambda: fake_hub.nacks)
    assert engine.version == 3
    assert fake_hub.nacks[0].failure.message.startswith("policy solver serves version 3 here")


async def five_versions_come(fake_hub, puller, make_task, make_version):
    """Announce versions while none can be pulled yet, of which an evaluation must have 3."""
    puller.open.clear()
    fake_hub.publish(make_version(1))
    fake_hub.issue(make_task(1, version=3, purpose=TaskPurpose.EVAL))
    await fake_hub.until(lambda: fake_hub.calls["StreamTasks open"])
    for version in (2, 3, 4, 5):
        fake_hub.publish(make_version(version))


async def test_a_version_that_is_no_longer_kept_holds_no_other_back(
    fake_hub, running, engine, puller, make_task, make_version
):
    await five_versions_come(fake_hub, puller, make_task, make_version)
    puller.gone = {3}
    puller.open.set()
    await fake_hub.until(lambda: fake_hub.nacks)
    assert engine.version == 5
    assert fake_hub.nacks[0].failure.message.startswith("policy solver serves version 5 here")


async def test_what_waits_for_an_engine_that_lost_its_weights_begins_once_it_has_them_again(
    fake_hub, running, engine, node, puller, make_task, monkeypatch
):
    monkeypatch.setattr(policies, "_LOOK_S", 0.01)
    fake_hub.issue(make_task(1))
    await fake_hub.until(lambda: fake_hub.results)
    # As engines over servers have it while one is started again. Were the version not taken for
    # live yet, it would be pulled once more, and nothing wait.
    puller.open.clear()
    engine.version = None
    fake_hub.issue(make_task(2))
    while not node._policies.gates["solver"].waiting_count:  # noqa: ASYNC110 - the stream makes it
        await asyncio.sleep(0.001)
    engine.version = 0
    puller.open.set()
    await fake_hub.until(lambda: len(fake_hub.results) == 2)
    assert len(fake_hub.rollouts) == 4


async def test_a_drained_node_finishes_gives_back_the_rest_and_leaves(
    fake_hub, running, engine, make_task
):
    engine.open.clear()
    fake_hub.issue(make_task(1))
    fake_hub.issue(make_task(2, minimum=5))
    await engine.until(lambda: engine.running == 2)
    fake_hub.direct(Directive(kind=DirectiveKind.DRAIN))
    await fake_hub.until(lambda: fake_hub.nacks)
    engine.open.set()
    assert await running is NodeDeparture.DRAINED
    assert [result.task_id for result in fake_hub.results] == ["task1"]
    assert [nack.task_id for nack in fake_hub.nacks] == ["task2"]
    assert fake_hub.credits[-1].max_outstanding == 0
    assert fake_hub.ends == ["raas-1 leaves: drained"]


async def test_a_run_that_is_over_stops_the_node_at_once(fake_hub, running, engine, make_task):
    fake_hub.issue(make_task(1, workflow_id="hangs"))
    fake_hub.direct(Directive(kind=DirectiveKind.STOP))
    assert await running is NodeDeparture.STOPPED
    assert fake_hub.ends == ["raas-1 leaves: stopped"]
    assert engine.running == 0


async def test_load_is_told_with_every_keep_alive(fake_hub, node, make_version, make_task):
    fake_hub.keep_alive_interval = timedelta(milliseconds=10)
    fake_hub.publish(make_version(0))
    async with asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await fake_hub.until(lambda: fake_hub.reports and fake_hub.credits)
        fake_hub.issue(make_task(1, workflow_id="hangs", samples=3))
        fake_hub.issue(make_task(2, samples=2))
        await fake_hub.until(lambda: any(load.tokens_per_s > 0 for load in fake_hub.loads))
        await fake_hub.until(lambda: fake_hub.loads[-1].inflight_count == 3)
        load = fake_hub.loads[-1]
        node.stop()
    assert (load.capacity, load.kv_fraction) == (8, 0.25)
    assert 0.0 <= load.wait_fraction <= 1.0


async def test_a_node_that_is_asked_to_leave_before_a_hub_answers_leaves(fake_hub, node):
    fake_hub.fail("JoinPool", times=1000)
    leaving = asyncio.ensure_future(node.run())
    await fake_hub.until(lambda: fake_hub.calls["JoinPool"])
    node.drain()
    assert await leaving is NodeDeparture.STOPPED


async def test_a_fenced_node_stops_with_the_reason(fake_hub, node):
    fake_hub.fail("StreamTasks", error=AstraflowError(Reason.SESSION_FENCED, "newer one"))
    with pytest.raises(AstraflowError) as raised:
        await node.run()
    assert raised.value.reason is Reason.SESSION_FENCED


async def test_a_run_that_has_ended_is_no_failure(fake_hub, node):
    fake_hub.fail("StreamTasks", error=AstraflowError(Reason.RUN_ENDED, "done"))
    assert await node.run() is NodeDeparture.STOPPED


async def test_a_wrong_token_is_an_answer_and_not_repeated(fake_hub, node):
    fake_hub.fail("JoinPool", error=AstraflowError(Reason.TOKEN_INVALID, "wrong join token"))
    with pytest.raises(AstraflowError) as raised:
        await node.run()
    assert raised.value.reason is Reason.TOKEN_INVALID
    assert fake_hub.calls["JoinPool"] == 1


async def test_a_version_that_fails_is_reported_and_tried_again(
    fake_hub, running, puller, make_version
):
    puller.failures.append(AstraflowError(Reason.DIGEST_MISMATCH, "bad bytes"))
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 3)
    states = [(report.version, report.state) for report in fake_hub.reports]
    assert states == [(0, VersionState.LIVE), (1, VersionState.FAILED), (1, VersionState.LIVE)]
    assert fake_hub.reports[1].failure.reason is Reason.DIGEST_MISMATCH


async def test_a_swap_that_fails_is_repeated_with_all_tensors(
    fake_hub, running, engine, make_version
):
    engine.refusals.append(AstraflowError(Reason.APPLY_FAILED, "shape"))
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 2)
    assert engine.swaps[-1].base_version is None
    assert fake_hub.reports[1].state is VersionState.LIVE


async def test_a_version_that_a_lost_server_came_back_with_is_reported(
    fake_hub, running, engine, make_version, monkeypatch
):
    async def lost(update):
        engine.version = update.version
        raise AstraflowError(Reason.ENGINE_FAILED, "the server was lost")

    await fake_hub.until(lambda: len(fake_hub.reports) == 1)
    monkeypatch.setattr(engine, "swap", lost)
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 3)
    states = [(report.version, report.state) for report in fake_hub.reports[1:]]
    assert states == [(1, VersionState.FAILED), (1, VersionState.LIVE)]


async def test_updates_skip_to_the_newest_unless_a_task_must_have_one(
    fake_hub, running, puller, engine, make_task, make_version
):
    await five_versions_come(fake_hub, puller, make_task, make_version)
    puller.open.set()
    await fake_hub.until(lambda: fake_hub.reports[-1].version == 5 and fake_hub.results)
    assert fake_hub.rollouts[0].policy_versions == {"solver": 3}
    live = [report.version for report in fake_hub.reports]
    assert live[-2:] == [3, 5]
    assert puller.tokens[-1] == b"transfer"


async def test_an_engine_that_broke_for_good_ends_its_node(node, engine, monkeypatch):
    def broken():
        raise AstraflowError(Reason.ENGINE_FAILED, "the engine broke")

    monkeypatch.setattr(engine, "load", broken)
    with pytest.raises(AstraflowError, match="the engine broke"):
        await node.run()
