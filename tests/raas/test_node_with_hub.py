"""The node against the real hub, with real weights from a real trainer's client."""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial

import pytest

from astraflow.core.batches import EndCause
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import ModelIdentity
from astraflow.core.status import RolloutPlace, RolloutQuery, RunState, StopMode
from astraflow.raas.node import NodeDeparture
from astraflow.raas.policies import ServedModel
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, start_run, train_counter
from astraflow.testing.line import TcpRelay
from astraflow.testing.nodes import make_node
from astraflow.weights.serve.server import RelayServer

STEPS = 5
DIGITS = "0123456789"


@pytest.fixture
def recipe(tmp_path):
    return small_recipe(
        tmp_path,
        workflow="test_digits",
        prompts=[{"prompt": str(100 + n)} for n in range(64)],
        changes={
            "policies.solver.sampling.max_new_tokens": 6,
            "policies.solver.trainer.groups_per_batch": 4,
            "policies.solver.trainer.step_count": STEPS,
            "rollouts.group_size": 4,
            "evals.suite": {"data_sets": [{"data_set": "train", "workflow": "main"}]},
        },
    )


def staleness_of(trained):
    """Return by how many versions each sampled token was behind."""
    return [
        step - int(version)
        for step, batch in enumerate(trained.batches)
        for part in batch.parts
        for version in part.values("versions")
        if version >= 0
    ]


async def test_a_run_goes_from_the_first_task_to_the_last_version(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node(alphabet=DIGITS)
        training = run.add_trainer()
        status = await run.finish()
    trained = training.result()
    assert (trained.end.cause, trained.end.batch_count) == (EndCause.STEP_LIMIT, STEPS)
    for batch in trained.batches:
        assert sum(part.row_count for part in batch.parts) == batch.header.row_count
    assert max(staleness_of(trained)) <= 1
    assert node.left.result() is NodeDeparture.STOPPED
    assert status.state is RunState.DONE
    assert status.policies[0].version == STEPS
    assert node.engine.version == STEPS
    assert node.engine.swaps[0].base_version is None
    evals = run.run_dir.evals.read_text().splitlines()
    assert len([json.loads(line) for line in evals]) == 2


async def test_nodes_pass_versions_on_to_each_other(tmp_path, recipe):
    servers = [RelayServer(["solver"]) for _ in range(2)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.close)
        run = await stack.enter_async_context(start_run(recipe, run_dir=tmp_path / "run"))
        nodes = [await run.add_node(alphabet=DIGITS, relays=server) for server in servers]
        training = run.add_trainer()
        status = await run.finish()
    assert training.result().end.batch_count == STEPS
    assert status.state is RunState.DONE
    assert max(node.engine.version for node in nodes) == STEPS
    updates = [json.loads(line) for line in run.run_dir.versions.read_text().splitlines()]
    assert any(update["state"] == "live" for update in updates)


async def test_what_a_stopped_node_held_is_done_by_another(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        leaving = await run.add_node(alphabet=DIGITS)
        leaving.engine.open.clear()
        training = run.add_trainer()
        await leaving.engine.until(lambda: leaving.engine.running >= 8)
        leaving.node.stop()
        assert await leaving.left is NodeDeparture.STOPPED
        await run.add_node(alphabet=DIGITS)
        status = await run.finish()
    assert training.result().end.batch_count == STEPS
    assert status.state is RunState.DONE


async def test_a_node_with_another_tokenizer_is_refused(tmp_path, recipe):
    tokenizer = CharTokenizer(DIGITS)

    def node_of(name, digest):
        known = ModelIdentity(name="digits", tokenizer_digest=digest)
        model = ServedModel(engine=SmallEngine(tokenizer), tokenizer=tokenizer, identity=known)
        join = {"hub": run.address, "token": run.join_token, "models": {"solver": model}}
        return make_node(recipe, name=name, capacity=4, **join)

    async with start_run(recipe, run_dir=tmp_path / "run") as run, asyncio.TaskGroup() as group:
        group.create_task((first := node_of("raas-1", bytes(32))).run())
        control = await run.control()
        async for status in control.watch_run(min_interval_s=0.01):
            if status.members:
                break
        with pytest.raises(AstraflowError, match="tokenizer of model 'digits' differs") as refused:
            await node_of("raas-2", bytes(31) + b"2").run()
        first.stop()
    assert refused.value.reason is Reason.MODEL_MISMATCH


async def test_nothing_is_lost_on_a_wire_that_is_cut_all_the_time(tmp_path, recipe):
    tokenizer = CharTokenizer(DIGITS)
    model = ServedModel(engine=SmallEngine(tokenizer), tokenizer=tokenizer)
    async with (
        start_run(recipe, run_dir=tmp_path / "run") as run,
        TcpRelay(run.address) as wire,
        asyncio.TaskGroup() as group,
    ):
        node = make_node(
            recipe,
            hub=wire.address,
            token=run.join_token,
            name="raas-1",
            capacity=16,
            models={"solver": model},
        )
        group.create_task(node.run())
        train = partial(train_counter, wire.address, groups_per_batch=4, loop=run.loop)
        training = run.add_thread(partial(train, token=run.join_token))
        control = await run.control()
        step = cut_count = 0
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].step > step:
                step = status.policies[0].step
                wire.cut()
                cut_count += 1
        status = await run.finish()
    assert training.result().end.batch_count == STEPS
    assert status.state is RunState.DONE
    assert cut_count > 1
    assert all(account.is_balanced for account in run.accounts())


async def test_an_operator_sees_and_steers_the_run(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        control = await run.control()
        await run.add_node(alphabet=DIGITS)
        await control.pause_run()
        assert (await control.get_run()).state is RunState.PAUSED
        await control.resume_run()
        training = run.add_trainer()
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].step >= 2:
                break
        [account] = await control.ledger.accounts()
        assert account.is_balanced
        trained = RolloutQuery(places=(RolloutPlace.TRAINED,), min_reward=5)
        records = [record async for record in control.ledger.rollouts(trained, limit=3)]
        assert len(records) == 3
        assert min(record.rollout.reward for record in records) >= 5
        assert [letter async for letter in control.ledger.dead_letters()] == []
        [suite] = await control.evals.suites()
        assert suite.suite == "suite"
        await control.stop_run(StopMode.DRAIN)
        await run.finish()
    assert training.result().end.batch_count <= STEPS


async def test_a_node_that_joins_after_the_last_step_serves_the_last_evaluation(tmp_path, recipe):
    clock = ManualClock()
    async with start_run(recipe, run_dir=tmp_path / "run", clock=clock) as run:
        node = await run.add_node(alphabet=DIGITS)
        training = run.add_trainer()
        await node.engine.until(lambda: node.engine.version == STEPS and node.engine.pins)
        node.engine.open.clear()
        # A trainer that left with the end of its data would be gone by now.
        await asyncio.wait({training}, timeout=1)
        node.line.silence()
        await node.kill()
        run.advance(recipe.hub.session_ttl_s + 1)
        await run.add_node(alphabet=DIGITS)
        status = await run.finish()
    assert training.result().end.batch_count == STEPS
    assert status.state is RunState.DONE
    evals = run.run_dir.evals.read_text().splitlines()
    assert len([json.loads(line) for line in evals]) == 2
