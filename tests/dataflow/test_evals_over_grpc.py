"""Evaluations run beside training, on the versions they were asked for."""

import asyncio

import pytest
from grpc import aio

from astraflow.config.run_dir import read_json_lines
from astraflow.core.errors import Reason
from astraflow.core.status import RunState
from astraflow.core.tasks import TaskPurpose, VersionRange
from astraflow.wire import control as wire
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.evals.v1 import eval_service_pb2 as pb

SUITE = {
    "data_sets": [{"data_set": "train", "workflow": "main", "repeats": 2}],
    "at_start": False,
    "at_end": False,
}


@pytest.fixture
def eval_recipe(recipe_of):
    def make(**suite):
        return recipe_of(rows=3, evals={"held_out": SUITE | suite})

    return make


async def work(scene, raas, trainer):
    await trainer.register()
    await raas.join()
    async with asyncio.TaskGroup() as group:
        group.create_task(raas.work())
        group.create_task(trainer.work())
        return await scene.serving


async def test_evals_at_both_ends_are_pinned_to_their_versions(start_hub, eval_recipe):
    async with start_hub(eval_recipe(at_start=True, at_end=True)) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        status = await work(scene, raas, trainer)
    assert status.state is RunState.DONE
    tasks = [task for task in raas.tasks_seen if task.purpose is TaskPurpose.EVAL]
    pins = {task.versions["solver"] for task in tasks}
    assert pins == {VersionRange(min=0, max=0), VersionRange(min=3, max=3)}
    rows = read_json_lines(scene.run_dir.evals)
    assert [row["versions"] for row in rows] == [{"solver": 0}, {"solver": 3}]
    assert [row["state"] for row in rows] == ["succeeded"] * 2, rows
    # Of the two samples of every prompt, one is right.
    assert [row["overall"]["avg_at_k"] for row in rows] == [0.5, 0.5]
    assert [row["overall"]["pass_at_k"]["2"] for row in rows] == [1.0, 1.0]


async def test_no_eval_rollout_reaches_a_batch(start_hub, eval_recipe):
    async with start_hub(eval_recipe(at_start=True)) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await work(scene, raas, trainer)
    evaluated = {t.group_id for t in raas.tasks_seen if t.purpose is TaskPurpose.EVAL}
    trained = {group.group_id for header in trainer.headers for group in header.groups}
    assert evaluated
    assert not evaluated & trained


async def test_an_eval_can_be_asked_for_watched_and_cancelled(start_hub, eval_recipe, reason_of):
    async with start_hub(eval_recipe()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        await trainer.publish()
        await raas.report_version("solver", 0)
        request = pb.CreateEvalRunRequest(request_id="mine", suite="held_out")
        created = await scene.evals.CreateEvalRun(request, metadata=scene.operator)
        run = wire.decode_eval_run(created.eval_run)
        assert run.versions == {"solver": 0}
        again = await scene.evals.CreateEvalRun(request, metadata=scene.operator)
        assert again.eval_run.eval_run_id == run.eval_run_id
        watch = scene.evals.WatchEvalRun(
            pb.WatchEvalRunRequest(eval_run_id=run.eval_run_id), metadata=scene.operator
        )
        assert not wire.decode_eval_run((await watch.read()).eval_run).state.is_final
        await scene.evals.CancelEvalRun(
            pb.CancelEvalRunRequest(eval_run_id=run.eval_run_id), metadata=scene.operator
        )
        while (message := await watch.read()) is not aio.EOF:
            last = wire.decode_eval_run(message.eval_run)
        assert last.state == "cancelled"
        unknown = pb.GetEvalRunRequest(eval_run_id="none")
        call = scene.evals.GetEvalRun(unknown, metadata=scene.operator)
        assert await reason_of(call) is Reason.EVAL_UNKNOWN


async def test_an_eval_counts_what_was_right(start_hub, eval_recipe):
    async with start_hub(eval_recipe()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await trainer.register()
        await raas.join()
        await trainer.publish()
        await raas.report_version("solver", 0)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        request = pb.CreateEvalRunRequest(request_id="mine", suite="held_out")
        created = await scene.evals.CreateEvalRun(request, metadata=raas.metadata)
        finished = 0
        while finished < 3:
            task = decode_rollout_task((await tasks.read()).task)
            await raas.answer(rollouts, task)
            finished += task.purpose is TaskPurpose.EVAL
        request = pb.GetEvalRunRequest(eval_run_id=created.eval_run.eval_run_id)
        answer = await scene.evals.GetEvalRun(request, metadata=scene.operator)
        run = wire.decode_eval_run(answer.eval_run)
        assert (run.state, run.scored_count) == ("succeeded", 6)


async def test_the_suites_of_the_recipe_are_listed(start_hub, eval_recipe):
    async with start_hub(eval_recipe()) as scene:
        answer = await scene.evals.ListEvalSuites(
            pb.ListEvalSuitesRequest(), metadata=scene.operator
        )
    (suite,) = map(wire.decode_eval_suite, answer.suites)
    assert (suite.suite, suite.policy_ids) == ("held_out", ("solver",))
    assert [(part.prompt_count, part.repeats) for part in suite.data_sets] == [(3, 2)]
