"""Members come, go, vanish and come back."""

import asyncio
import time
from contextlib import suppress

import grpc
import numpy as np
import pytest
from grpc import aio

from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.events import Ticked
from astraflow.core.members import DirectiveKind, SessionResume
from astraflow.core.packing import laid_out
from astraflow.core.rollouts import Disposition, SampleFailure, TaskResult
from astraflow.core.status import RunState
from astraflow.wire import common
from astraflow.wire.rollout import decode_batch_header, decode_batch_part, encode_rollout
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.control.v1 import control_service_pb2
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.evals.v1 import eval_service_pb2
from made_up import made_up_trajectory


async def ready(scene, raas):
    """Bring a run to where tasks flow; return the trainer."""
    trainer = scene.trainer()
    await trainer.register()
    await raas.join()
    await trainer.publish()
    await raas.report_version("solver", 0)
    return trainer


async def next_task(tasks):
    message = await tasks.read()
    assert message is not aio.EOF
    return decode_rollout_task(message.task)


async def keep(member):
    """Keep a session alive until it ends."""
    with suppress(AstraflowError, aio.AioRpcError):
        while True:
            await member.keep_alive()
            await asyncio.sleep(member.keep_alive_s)


async def end_of(stream):
    """Read a stream to its end; return its status."""
    with suppress(aio.AioRpcError):
        while await stream.read() is not aio.EOF:
            pass
    return await stream.code()


async def test_what_a_silent_raas_held_is_issued_again(start_hub, recipe_of):
    clock = ManualClock()
    async with start_hub(recipe_of(hub__session_ttl_s=9), clock=clock) as scene:
        lost, other = scene.raas("lost"), scene.raas("other")
        trainer = await ready(scene, lost)
        tasks = await lost.open_tasks()
        held = [await next_task(tasks) for _ in range(2)]
        await other.join()
        for _ in range(2):
            clock.advance(5)
            await trainer.keep_alive()
            await other.keep_alive()
        scene.hub.apply(Ticked())
        assert await end_of(tasks) is grpc.StatusCode.UNAUTHENTICATED
        async with asyncio.TaskGroup() as group:
            group.create_task(other.work())
            trainer.next_version = 0
            group.create_task(trainer.work())
            status = await scene.serving
    assert status.state is RunState.DONE
    attempts = {task.group_id: task.attempt for task in other.tasks_seen}
    assert [attempts[task.group_id] for task in held] == [1, 1]


@pytest.mark.slow
async def test_a_hub_that_stood_still_hears_its_members_first(start_hub, recipe_of):
    async with start_hub(recipe_of(hub__session_ttl_s=1)) as scene:
        raas = scene.raas()
        await raas.join()
        keeping = asyncio.create_task(keep(raas))
        time.sleep(1.3)  # noqa: ASYNC251 - it is the loop of the hub that stands still
        await asyncio.sleep(0.1)
        await raas.keep_alive()
        keeping.cancel()


async def test_a_member_says_little_of_itself(start_hub, recipe_of, reason_of):
    """All that look at the run read it."""
    async with start_hub(recipe_of()) as scene:
        assert await reason_of(scene.raas("n" * 1025).join()) is Reason.INVALID_FIELD
        trainer = scene.trainer().register(region="r" * 1025)
        assert await reason_of(trainer) is Reason.INVALID_FIELD
        await scene.raas("n" * 1024).join()


async def test_an_ended_session_says_so(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await raas.join()
        await raas.leave()
        assert await reason_of(raas.keep_alive()) is Reason.SESSION_ENDED
        assert await reason_of(raas.report_version("solver", 0)) is Reason.SESSION_ENDED
        tasks = await raas.open_tasks()
        assert await end_of(tasks) is grpc.StatusCode.UNAUTHENTICATED
        await raas.leave()


async def test_leaving_ends_the_streams_with_ok(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        versions = raas.watch_versions("solver")
        task = await next_task(tasks)
        await raas.answer(rollouts, task)
        await versions.read()
        await raas.leave()
        for stream in (tasks, rollouts, versions):
            assert await end_of(stream) is grpc.StatusCode.OK


async def test_a_second_stream_replaces_the_first(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        trainer = await ready(scene, raas)
        first = await raas.open_tasks(2)
        task = await next_task(first)
        second = await raas.open_tasks(4)
        assert await end_of(first) is grpc.StatusCode.ABORTED
        # What was sent is held and not sent again.
        assert (await next_task(second)).task_id != task.task_id
        batches = trainer.batches()
        await batches.initial_metadata()
        again = trainer.batches()
        assert await end_of(batches) is grpc.StatusCode.ABORTED
        again.cancel()


async def test_a_cut_stream_goes_on_with_what_was_not_sent(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        first = await raas.open_tasks(2)
        held = await next_task(first)
        first.cancel()
        second, rollouts = await raas.open_tasks(4), await raas.open_rollouts()
        other = await next_task(second)
        assert other.group_id != held.group_id
        for task in (held, other):
            await raas.answer(rollouts, task)
        assert {ack.disposition for ack in raas.acks} == {Disposition.ACCEPTED}


async def test_a_nacked_task_goes_elsewhere(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        first, second = scene.raas("first"), scene.raas("second")
        await ready(scene, first)
        tasks = await first.open_tasks(2)
        task = await next_task(tasks)
        await second.join()
        await second.report_version("solver", 0)
        others = await second.open_tasks(64)
        failure = {"reason": 48, "message": "not served"}
        await tasks.write(pb.StreamTasksRequest(credit={"max_outstanding": 0}))
        await tasks.write(pb.StreamTasksRequest(nack={"task_id": task.task_id, "failure": failure}))
        while (await next_task(others)).group_id != task.group_id:
            pass


async def test_messages_of_a_stream_that_take_gigabytes_are_not_read(
    start_hub, recipe_of, reason_of
):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        nack = pb.TaskNack(task_id="task", failure={"reason": 48, "message": "m" * (3 << 20)})
        await tasks.write(pb.StreamTasksRequest(nack=nack))
        assert await reason_of(_all_of(tasks)) is Reason.MESSAGE_TOO_LARGE
        await rollouts.write(pb.StreamRolloutsRequest(items=[pb.RolloutItem()] * (2 << 20)))
        assert await reason_of(_all_of(rollouts)) is Reason.MESSAGE_TOO_LARGE


async def test_a_node_that_steers_without_end_waits_for_the_journal(
    start_hub, recipe_of, journal_that_waits
):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks = await raas.open_tasks(0)
        with journal_that_waits(scene):
            for _ in range(1000):
                await tasks.write(pb.StreamTasksRequest(credit={"max_outstanding": 0}))
            await tasks.done_writing()
            end = asyncio.create_task(_all_of(tasks))
            for _ in range(100):
                # Suites never change: who asks for them waits for nothing.
                await scene.evals.ListEvalSuites(
                    eval_service_pb2.ListEvalSuitesRequest(), metadata=scene.operator
                )
            assert not end.done()
            assert scene.hub.commits.unsafe_count < 200
        await end


async def _all_of(stream):
    while await stream.read() is not aio.EOF:
        pass


async def test_an_item_that_is_not_sound_costs_only_itself(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        task = await next_task(tasks)
        broken = pb.RolloutItem()
        broken.rollout.CopyFrom(encode_rollout(raas.sample(task, 0)))
        broken.rollout.trajectories[0].version_spans[0].length = 1
        sound = raas.sample(task, 0)
        request = pb.StreamRolloutsRequest(items=[broken])
        request.items.add().rollout.CopyFrom(encode_rollout(sound))
        await rollouts.write(request)
        refused, taken = (await rollouts.read()).acks
        assert refused.disposition == pb.DISPOSITION_REJECTED
        assert refused.item_id == broken.rollout.rollout_id
        assert taken.disposition == pb.DISPOSITION_ACCEPTED
        assert (await raas.send(rollouts, sound)).disposition is Disposition.DUPLICATE


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (b"\x0a\xff", "items"),
        (b"\x0a\x04\x0a\x02\x0a\x09", "rollout"),
        (b"\x0a\x04\x12\x02\x0a\x09", "result"),
    ],
)
async def test_bytes_that_are_no_items_end_their_stream_alone(start_hub, recipe_of, sent, field):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        method = "/astraflow.dataflow.v1.RaasService/StreamRollouts"
        stream = raas.channel.stream_stream(method)(metadata=raas.metadata)
        await stream.write(sent)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        await raas.answer(rollouts, await next_task(tasks))
        assert raas.acks[-1].disposition is Disposition.ACCEPTED


async def test_a_process_that_comes_back_goes_on(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks = await raas.open_tasks(2)
        held = await next_task(tasks)
        older = raas.token
        resume = SessionResume(resume_token=older, incarnation=1, held_task_ids=(held.task_id,))
        membership = await raas.join(resume)
        assert membership.session.held_task_ids == (held.task_id,)
        rollouts = await raas.open_rollouts()
        await raas.answer(rollouts, held)
        assert raas.acks[-1].disposition is Disposition.ACCEPTED
        raas.token = older
        await raas.keep_alive()


async def test_what_was_on_its_way_to_a_stream_that_nobody_reads_is_sent_again(
    start_hub, recipe_of
):
    """A node finds its connection dead before the hub does."""
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        deaf = await raas.open_tasks(2)
        lost = await next_task(deaf)
        await raas.join(SessionResume(resume_token=raas.token, incarnation=1))
        tasks = await raas.open_tasks(2)
        assert (await next_task(tasks)).task_id == lost.task_id
        assert await end_of(deaf) is grpc.StatusCode.ABORTED


async def test_a_newer_process_fences_the_older(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        older, newer = scene.raas(), scene.raas()
        await ready(scene, older)
        first = SessionResume(resume_token=older.token, incarnation=1)
        member_id = older.member_id
        await older.join(first)
        tasks = await older.open_tasks(2)
        await next_task(tasks)
        await newer.join(SessionResume(resume_token=older.token, incarnation=2))
        assert newer.member_id == member_id
        assert await end_of(tasks) is grpc.StatusCode.UNAUTHENTICATED
        assert await reason_of(older.keep_alive()) is Reason.SESSION_FENCED
        assert await reason_of(older.leave()) is Reason.SESSION_FENCED
        await newer.keep_alive()


async def test_an_older_process_does_not_speak_for_the_newer_while_that_is_written(
    start_hub, recipe_of, reason_of, journal_that_waits
):
    async with start_hub(recipe_of()) as scene:
        raas, older, newer = scene.raas(), scene.trainer(), scene.trainer()
        await raas.join()
        await older.register()
        await older.publish()
        async with asyncio.TaskGroup() as group:
            working = group.create_task(raas.work())
            batches = older.batches()
            while not (message := await batches.read()).HasField("header"):
                pass
            working.cancel()
        batch_id = message.header.batch_id
        with journal_that_waits(scene):
            resume = SessionResume(resume_token=older.token, incarnation=2)
            registering = asyncio.ensure_future(newer.register(resume=resume))
            for _ in range(3):
                # It has heard of it by then.
                assert await reason_of(scene.raas().keep_alive()) is Reason.TOKEN_INVALID
            late = await asyncio.gather(reason_of(older.ack(batch_id)), reason_of(older.leave()))
        await registering
        assert late == [Reason.SESSION_FENCED] * 2
        await newer.keep_alive()


@pytest.mark.parametrize("is_raas", [True, False])
async def test_a_newer_process_fences_one_whose_session_had_ended(
    start_hub, recipe_of, reason_of, is_raas
):
    async with start_hub(recipe_of()) as scene:
        make = scene.raas if is_raas else scene.trainer
        older, newer = make(), make()
        await (older.join() if is_raas else older.register())
        await older.leave()
        assert await reason_of(older.keep_alive()) is Reason.SESSION_ENDED
        resume = SessionResume(resume_token=older.token, incarnation=2)
        await (newer.join(resume) if is_raas else newer.register(resume=resume))
        assert newer.member_id == older.member_id
        assert await reason_of(older.keep_alive()) is Reason.SESSION_FENCED
        await newer.keep_alive()


async def test_unsettled_batches_come_again_whole_as_sources_or_as_columns(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        trainer = await ready(scene, raas)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(raas.work())
            headers, sent = [], []
            for sources in (True, False):
                stream = trainer.batches(sources=sources)
                message = await stream.read()
                while not message.HasField("header"):
                    message = await stream.read()
                headers.append(decode_batch_header(message.header))
                parts = [await stream.read() for _ in range(headers[-1].part_count)]
                assert all(part.HasField("part") for part in parts)
                sent.append([decode_batch_part(part.part) for part in parts])
            working.cancel()
        assert headers[0].batch_id == headers[1].batch_id
        assert [header.delivery_count for header in headers] == [1, 2]
        compact, whole = sent
        assert all(part.sources and "tokens" not in part.columns for part in compact)
        assert not any(part.sources for part in whole)
        made = [laid_out(part, headers[0].policy_ids) for part in compact]
        for one, other in zip(made, whole, strict=True):
            assert one.rollout_ids == other.rollout_ids
            assert one.columns.keys() == other.columns.keys()
            for name in one.columns:
                np.testing.assert_array_equal(one.values(name), other.values(name))
        trainer.step = 1
        assert await trainer.ack(headers[0].batch_id)
        assert await trainer.ack(headers[0].batch_id)


async def test_a_drained_member_is_told_on_its_stream(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks = await raas.open_tasks(0)
        request = control_service_pb2.DrainMemberRequest(member_id=raas.member_id)
        await scene.control.DrainMember(request, metadata=scene.operator)
        directive = common.decode_directive((await tasks.read()).directive)
        assert directive.kind is DirectiveKind.DRAIN
        kept = await raas.keep_alive()
        assert common.decode_directive(kept.directive).kind is DirectiveKind.DRAIN


async def test_a_task_result_without_rollouts_is_tried_again(start_hub, recipe_of, infra_failure):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks, rollouts = await raas.open_tasks(2), await raas.open_rollouts()
        task = await next_task(tasks)
        failures = tuple(map(infra_failure, task.sample_indexes))
        result = TaskResult(task_id=task.task_id, rollout_count=0, failures=failures)
        assert (await raas.send(rollouts, result)).disposition is Disposition.ACCEPTED
        again = await next_task(tasks)
        assert (again.group_id, again.attempt) == (task.group_id, 1)


@pytest.fixture
def infra_failure():
    failure = Failure(reason=Reason.ENGINE_FAILED, message="lost", retryable=True)
    return lambda index: SampleFailure(sample_index=index, failure=failure)


async def test_a_trajectory_of_no_policy_of_the_run_is_refused_and_leaves_no_file(
    start_hub, recipe_of, tmp_path
):
    """One without a sampled token, too: its policy names a file of rollouts."""
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await ready(scene, raas)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        for number in range(2):
            task = await next_task(tasks)
            liar = made_up_trajectory(f"t{number}", f"{tmp_path}/elsewhere", [], prompt_count=3)
            sent = [raas.sample(task, index, trajectories=(liar,)) for index in range(2)]
            acks = await raas.send_all(rollouts, sent)
            assert {ack.reason for ack in acks} == {Reason.POLICY_UNKNOWN}
    assert not (tmp_path / "elsewhere.jsonl").exists()
