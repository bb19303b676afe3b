"""The whole way of a prompt, from the data set to a version, over real sockets."""

import asyncio
import json
from datetime import timedelta

from astraflow.config.run_dir import read_json_lines
from astraflow.core.batches import EndCause
from astraflow.core.clock import ManualClock
from astraflow.core.events import Ticked
from astraflow.core.status import RunState
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.control.v1 import control_service_pb2, ledger_service_pb2


async def run_through(scene, raas, trainers):
    """Let members work until the hub is done; return its status."""
    async with asyncio.TaskGroup() as group:
        for trainer in trainers:
            await trainer.register()
            group.create_task(trainer.work())
        for each in raas:
            await each.join()
            group.create_task(each.work())
        return await scene.serving


async def test_prompts_become_batches_and_versions(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        status = await run_through(scene, [raas], [trainer])
    assert status.state is RunState.DONE
    assert trainer.end.cause is EndCause.STEP_LIMIT
    assert trainer.end.batch_count == trainer.step == 3
    assert [len(header.groups) for header in trainer.headers] == [2, 2, 2]
    assert raas.live == {"solver": 3}
    assert all(ack.disposition in ("accepted", "dropped") for ack in raas.acks)


async def test_rows_carry_what_was_sampled(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        trainer = scene.trainer()
        await run_through(scene, [scene.raas()], [trainer])
    for part in trainer.parts:
        assert part.values("tokens").tolist() == [0, 1, 2, 3] * part.row_count
        assert part.values("loss_mask").tolist() == [False, True, True, True] * part.row_count
        rewards = part.values("rewards").tolist()
        assert sorted(rewards) == [0.0] * (len(rewards) // 2) + [1.0] * (len(rewards) // 2)


async def test_staleness_stays_within_the_limit(start_hub, recipe_of):
    async with start_hub(recipe_of(policies__solver__trainer__step_count=8)) as scene:
        trainer = scene.trainer()
        await run_through(scene, [scene.raas()], [trainer])
    rows = read_json_lines(scene.run_dir.metrics)
    assert len(rows) == 8
    assert max(row["lag/max"] for row in rows) <= 1


async def test_a_run_leaves_its_files(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas, trainer = scene.raas(), scene.trainer()
        await run_through(scene, [raas], [trainer])
    folder = scene.run_dir
    rows = read_json_lines(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["policy"] for row in rows} == {"solver"}
    wanted = {"reward/mean", "lag/mean", "lag/max", "group/zero_std_frac", "buffer/size"}
    wanted |= {"time/wait_batch_frac", "perf/tokens_per_s", "train/loss"}
    assert wanted <= rows[0].keys()
    assert rows[0]["reward/mean"] == 0.5
    assert rows[0]["time/wait_batch_frac"] == 0.25
    versions = read_json_lines(folder.versions)
    assert {row["version"] for row in versions} <= {0, 1, 2, 3}
    assert all(row["member"] == raas.member_id for row in versions)
    status = json.loads(folder.status.read_text())
    assert status["state"] == "done"
    assert all(book["balanced"] for book in status["books"])
    assert {member["name"] for member in status["members"]} == {"raas-1", "trainer-solver"}
    assert status["hub"]["event_count"] > 0
    assert 0 <= status["hub"]["idle_fraction"] <= 1
    assert not (folder.root / "status.json.draft").exists()


async def test_a_finite_data_set_ends_cleanly(start_hub, recipe_of):
    recipe = recipe_of(rows=5, rollouts__epochs=1, policies__solver__trainer__step_count=None)
    async with start_hub(recipe) as scene:
        trainer = scene.trainer()
        status = await run_through(scene, [scene.raas()], [trainer])
    assert status.state is RunState.DONE
    assert trainer.end.cause is EndCause.SOURCE_EXHAUSTED
    assert [len(header.groups) for header in trainer.headers] == [2, 2, 1]
    prompts = {group.prompt_id for header in trainer.headers for group in header.groups}
    assert len(prompts) == 5


async def test_two_policies_have_their_own_batches_and_versions(start_hub, recipe_of):
    recipe = recipe_of(policies=("solver", "verifier"))
    async with start_hub(recipe) as scene:
        trainers = [scene.trainer("solver"), scene.trainer("verifier")]
        raas = scene.raas(policies=("solver", "verifier"))
        status = await run_through(scene, [raas], trainers)
    assert status.state is RunState.DONE
    for trainer in trainers:
        assert trainer.step == 3
        assert {header.policy_id for header in trainer.headers} == {trainer.policy_id}


async def test_several_raas_share_the_work(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        nodes, trainer = [scene.raas(f"raas-{number}") for number in range(3)], scene.trainer()
        await trainer.register()
        await trainer.publish()
        groups = set()
        for node in nodes:
            await node.join()
            await node.report_version("solver", 0)
            tasks = await node.open_tasks(credit=2)
            task = decode_rollout_task((await tasks.read()).task)
            assert task.sample_indexes == (0, 1)
            groups.add(task.group_id)
    assert len(groups) == 3


async def test_the_books_can_be_read_while_it_runs(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        trainer = scene.trainer()
        await raas.join()
        await trainer.register()
        await trainer.publish()
        rollouts, tasks = await raas.open_rollouts(), await raas.open_tasks(2)
        await raas.report_version("solver", 0)
        message = await tasks.read()
        task = decode_rollout_task(message.task)
        await raas.answer(rollouts, task)
        answer = await scene.ledger.GetLedger(
            ledger_service_pb2.GetLedgerRequest(), metadata=scene.operator
        )
        assert [account.balanced for account in answer.accounts] == [True]
        listed = await scene.ledger.ListRollouts(
            ledger_service_pb2.ListRolloutsRequest(page_size=1), metadata=scene.operator
        )
        assert len(listed.rollouts) == 1
        assert listed.next_page_token
        assert not listed.rollouts[0].rollout.trajectories
        rest = await scene.ledger.ListRollouts(
            ledger_service_pb2.ListRolloutsRequest(
                view=ledger_service_pb2.ROLLOUT_VIEW_FULL,
                page_token=listed.next_page_token,
            ),
            metadata=scene.operator,
        )
        assert len(rest.rollouts) == 1
        assert rest.rollouts[0].rollout.trajectories
        run = await scene.control.GetRun(
            control_service_pb2.GetRunRequest(), metadata=scene.operator
        )
        assert {member.name for member in run.run.members} == {"raas-1", "trainer-solver"}


async def test_the_hub_stays_for_a_trainer_that_writes_its_last_checkpoint(start_hub, recipe_of):
    recipe, clock = recipe_of(policies__solver__trainer__step_count=1), ManualClock()
    async with start_hub(recipe, clock=clock) as scene, asyncio.TaskGroup() as group:
        raas, trainer, is_written = scene.raas(), scene.trainer(), asyncio.Event()
        leave, trainer.leave = trainer.leave, is_written.wait
        await trainer.register()
        await raas.join()
        group.create_task(raas.work())
        working = group.create_task(trainer.work())
        async for _ in scene.hub.watch_status(timedelta()):
            pass
        clock.advance(11)
        scene.hub.apply(Ticked())
        await scene.hub.commits.passed()
        assert scene.hub.executor.over.is_set()
        await trainer.ack(trainer.headers[-1].batch_id, checkpoint_id="last")
        is_written.set()
        await working
        await leave()
        assert (await scene.serving).state is RunState.DONE
