"""What an operator sees and steers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from astraflow.core.batches import EndCause
from astraflow.core.errors import Reason
from astraflow.core.status import RunState
from astraflow.dataflow.servicers.members import MemberServicer
from astraflow.rpc.access import Access, HubTokens
from astraflow.rpc.channel import dial
from astraflow.rpc.server import Servicer, start_server
from astraflow.wire import control as wire
from astraflow_proto.control.v1 import control_service_pb2 as pb
from astraflow_proto.control.v1 import ledger_service_pb2
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import (
    add_TrainerServiceServicer_to_server,
)


async def stop(scene, mode):
    await scene.control.StopRun(pb.StopRunRequest(mode=mode), metadata=scene.operator)


async def state_of(scene):
    answer = await scene.control.GetRun(pb.GetRunRequest(), metadata=scene.operator)
    return wire.decode_run_status(answer.run).state


async def until_header(stream):
    while not (message := await stream.read()).HasField("header"):
        pass
    return message.header


async def test_a_drain_trains_on_what_is_out_and_ends(start_hub, recipe_of):
    recipe = recipe_of(policies__solver__trainer__step_count=None)
    async with start_hub(recipe) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(raas.work())
            training = group.create_task(trainer.work())
            watch = scene.control.WatchRun(
                pb.WatchRunRequest(min_interval=Duration(nanos=1)), metadata=scene.operator
            )
            async for message in watch:
                if message.run.policies[0].step >= 2:
                    break
            await stop(scene, pb.STOP_MODE_DRAIN)
            status = await scene.serving
        assert training.done()
    assert status.state is RunState.DONE
    assert trainer.end is not None
    assert trainer.end.cause is EndCause.STOPPED


async def test_a_cancel_ends_a_run_that_has_no_members(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        assert await state_of(scene) is RunState.WAITING
        await stop(scene, pb.STOP_MODE_CANCEL)
        assert (await scene.serving).state is RunState.DONE


async def test_a_cancel_shortens_a_drain(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        await trainer.publish()
        await raas.report_version("solver", 0)
        tasks, batches = await raas.open_tasks(), trainer.batches()
        assert (await tasks.read()).HasField("task")
        await stop(scene, pb.STOP_MODE_DRAIN)
        await stop(scene, pb.STOP_MODE_CANCEL)
        while not (message := await tasks.read()).HasField("directive"):
            assert message.HasField("task") or message.HasField("cancellation")
        while not (message := await batches.read()).HasField("end_of_data"):
            pass
        await raas.leave()
        await trainer.leave()
        assert (await scene.serving).state is RunState.DONE


async def test_a_watch_ends_with_the_final_state(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        watch = scene.control.WatchRun(pb.WatchRunRequest(), metadata=scene.operator)
        first = wire.decode_run_status((await watch.read()).run)
        await stop(scene, pb.STOP_MODE_CANCEL)
        states = [first.state]
        while (message := await watch.read()) is not aio.EOF:
            states.append(wire.decode_run_status(message.run).state)
        assert states[0] is RunState.WAITING
        assert states[-1] is RunState.DONE


async def test_a_paused_run_issues_nothing_until_it_is_resumed(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        await scene.control.PauseRun(pb.PauseRunRequest(), metadata=scene.operator)
        await trainer.publish()
        await raas.report_version("solver", 0)
        tasks, batches = await raas.open_tasks(), trainer.batches()
        await batches.initial_metadata()
        answer = await scene.ledger.ExplainWait(
            ledger_service_pb2.ExplainWaitRequest(policy_id="solver"), metadata=scene.operator
        )
        assert answer.reasons
        assert await state_of(scene) is RunState.PAUSED
        await scene.control.ResumeRun(pb.ResumeRunRequest(), metadata=scene.operator)
        assert (await tasks.read()).HasField("task")


@asynccontextmanager
async def telling_at_once(scene):
    """Serve the same hub at another port, where nobody waits long to be told why they wait."""
    directory = scene.hub.directory
    tokens = HubTokens(join="join", operator="operator")
    access = Access(tokens, sessions=directory.sessions, roles=directory.roles)
    methods = MemberServicer(scene.hub, access, wait_interval_s=0.01)
    servicer = Servicer(add=add_TrainerServiceServicer_to_server, methods=methods)
    async with (
        await start_server([servicer], listen="127.0.0.1:0") as server,
        dial(server.address) as channel,
    ):
        yield replace(scene, channel=channel)


async def test_a_trainer_that_gets_nothing_is_told_why(start_hub, recipe_of):
    async with start_hub(recipe_of()) as hub, telling_at_once(hub) as scene:
        trainer = scene.trainer()
        await trainer.register()
        stream = trainer.batches()
        assert (await stream.read()).WhichOneof("event") == "wait_reason"


@pytest.mark.parametrize("seconds", [315_576_000_000, -315_576_000_000])
async def test_a_time_that_no_calendar_has_is_taken_for_a_long_one(start_hub, recipe_of, seconds):
    async with start_hub(recipe_of()) as scene:
        raas, span = scene.raas(), Duration(seconds=seconds)
        await raas.join()
        drain = pb.DrainMemberRequest(member_id=raas.member_id, grace=span)
        await scene.control.DrainMember(drain, metadata=scene.operator)
        advice = pb.GetScaleAdviceRequest(window=span)
        await scene.control.GetScaleAdvice(advice, metadata=scene.operator)
        stop = pb.StopRunRequest(mode=pb.STOP_MODE_DRAIN, grace=span)
        await scene.control.StopRun(stop, metadata=scene.operator)


async def test_draining_nobody_is_refused(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        call = scene.control.DrainMember(
            pb.DrainMemberRequest(member_id="m-none"), metadata=scene.operator
        )
        assert await reason_of(call) is Reason.MEMBER_UNKNOWN


async def test_a_data_set_that_breaks_fails_the_run(start_hub, recipe_of):
    recipe = recipe_of()
    async with start_hub(recipe) as scene:
        path = recipe.data["train"].path
        path.write_bytes(b"\xff" * path.stat().st_size)
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        await trainer.publish()
        await raas.report_version("solver", 0)
        await raas.open_tasks()
        watch = scene.control.WatchRun(pb.WatchRunRequest(), metadata=scene.operator)
        async for message in watch:
            status = wire.decode_run_status(message.run)
        assert status.state is RunState.FAILED
        assert "not JSON" in status.failure.message


async def test_advice_names_the_nodes_and_asks_for_what_is_missing(start_hub, recipe_of):
    recipe = recipe_of(autoscale__min=2)
    async with start_hub(recipe) as scene:
        await scene.raas().join()
        answer = await scene.control.GetScaleAdvice(
            pb.GetScaleAdviceRequest(), metadata=scene.operator
        )
        advice = answer.advice
        assert (advice.member_count, advice.target_member_count) == (1, 2)
        assert [policy.policy_id for policy in advice.policies] == ["solver"]
        assert not advice.members[0].live
        await stop(scene, pb.STOP_MODE_CANCEL)
