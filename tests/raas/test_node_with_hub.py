"""The node against the real hub, with real weights from a real trainer's client."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

from astraflow.client.control import ControlClient
from astraflow.client.ledger import RolloutFilter
from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Recipe
from astraflow.core.batches import BatchOutcome, EndCause
from astraflow.core.dtype import Dtype
from astraflow.core.layout import Layout
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.status import RolloutPlace, RunState, StopMode
from astraflow.core.versions import WeightEndpoint
from astraflow.dataflow.server import serve_hub
from astraflow.dataflow.tokens import HubTokens
from astraflow.raas.node import Departure, NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.puller import WeightPuller
from astraflow.weights.server import WeightServer
from astraflow.workflows.building import workflow_specs

STEPS = 5


def make_recipe(folder, **changes):
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": str(100 + n)}) + "\n" for n in range(64)))
    return Recipe.model_validate(
        {
            "name": "tiny",
            "policies": {
                "solver": {
                    "model": {"path": str(folder)},
                    "sampling": {"max_new_tokens": 6},
                    "trainer": {
                        "groups_per_batch": 4,
                        "max_staleness": 1,
                        "step_count": STEPS,
                    },
                }
            },
            "data": {"train": {"path": str(data)}},
            "workflows": {"main": {"name": "test_digits"}},
            "rollouts": {"data_set": "train", "workflow": "main", "group_size": 4},
            "evals": {"suite": {"data_sets": [{"data_set": "train", "workflow": "main"}]}},
            "hub": {"session_ttl_s": 30},
            **changes,
        }
    )


def train(address, loop):
    """Be a trainer: weights that count the steps."""
    layout = Layout.of([("w", Dtype.F32, (100,))])
    publisher = WeightPublisher("solver", layout)

    def weights(step):
        return {"w": np.full(100, step, np.float32).view(np.uint32)}

    with WeightServer(publisher, loop=loop) as server:
        register = RegisterTrainer(
            policy_id="solver",
            name="trainer",
            contract=Contract(),
            groups_per_batch=4,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
        )
        with TrainerClient(hub=address, token="join", register=register, loop=loop) as client:
            client.on_transfer_token(server.set_transfer_token)
            client.publish_version(publisher.publish(0, weights(0)))
            staleness = []
            for step, batch in enumerate(client.batches(), start=1):
                assert sum(part.row_count for part in batch.parts) == batch.header.row_count
                for part in batch.parts:
                    versions = part.values("versions")
                    staleness += (step - 1 - versions[versions >= 0]).tolist()
                client.publish_version(publisher.publish(step, weights(step), step=step))
                client.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=step)
            return client.end_of_data, staleness


@pytest.fixture
def start_node(engine_class, tokenizer_class):
    """Starts nodes with an engine of their own."""

    def start(recipe, address, name="raas-1"):
        codes = tuple(spec.code for spec in workflow_specs(recipe))
        engine = engine_class()
        node = RaasNode(
            NodeSettings(hub=address, token="join", name=name, capacity=16, codes=codes),
            models={"solver": ServedModel(engine=engine, tokenizer=tokenizer_class())},
            puller=WeightPuller,
        )
        return node, engine

    return start


@asynccontextmanager
async def hub_of(recipe, folder):
    ready = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(
            serve_hub(
                recipe,
                run_dir=folder / "run",
                tokens=HubTokens(join="join", operator="operator"),
                on_ready=lambda _, address: ready.set_result(address),
            )
        )
        yield serving, await ready


class Wire:
    """A TCP relay to the hub that can be cut."""

    def __init__(self, address):
        self._target = address.rsplit(":", 1)
        self._writers = set()
        self.cut_count = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()

    def cut(self):
        """Break every connection, with whatever is on its way."""
        self.cut_count += 1
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader, writer):
        try:
            hub_reader, hub_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        ends = {writer, hub_writer}
        self._writers |= ends
        await asyncio.gather(_pump(reader, hub_writer), _pump(hub_reader, writer))
        self._writers -= ends


async def _pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
def loop():
    with LoopThread() as loop:
        yield loop


async def test_a_run_goes_from_the_first_task_to_the_last_version(tmp_path, start_node, loop):
    recipe = make_recipe(tmp_path)
    async with hub_of(recipe, tmp_path) as (serving, address), asyncio.TaskGroup() as group:
        node, engine = start_node(recipe, address)
        left = group.create_task(node.run())
        end, staleness = await asyncio.to_thread(train, address, loop)
    assert (end.cause, end.batch_count) == (EndCause.STEP_LIMIT, STEPS)
    assert max(staleness) <= 1
    assert left.result() is Departure.STOPPED
    status = serving.result()
    assert status.state is RunState.DONE
    assert status.policies[0].version == STEPS
    assert engine.version == STEPS
    assert engine.swaps[0].base_version is None
    evals = [json.loads(line) for line in (tmp_path / "run/evals.jsonl").read_text().splitlines()]
    assert len(evals) == 2


async def test_what_a_dead_node_held_is_done_by_another(tmp_path, start_node, loop):
    recipe = make_recipe(tmp_path)
    async with hub_of(recipe, tmp_path) as (serving, address), asyncio.TaskGroup() as group:
        dying, engine = start_node(recipe, address, "raas-1")
        engine.open.clear()
        death = group.create_task(dying.run())
        training = group.create_task(asyncio.to_thread(train, address, loop))
        await engine.until(lambda: engine.running >= 8)
        dying.stop()
        assert await death is Departure.STOPPED
        living, _ = start_node(recipe, address, "raas-2")
        group.create_task(living.run())
        end, _ = await training
    assert end.batch_count == STEPS
    assert serving.result().state is RunState.DONE


async def test_nothing_is_lost_on_a_wire_that_is_cut_all_the_time(tmp_path, start_node, loop):
    recipe = make_recipe(tmp_path)
    async with (
        hub_of(recipe, tmp_path) as (serving, address),
        Wire(address) as wire,
        ControlClient(address, token="operator") as control,
        asyncio.TaskGroup() as group,
    ):
        node, _ = start_node(recipe, wire.address)
        group.create_task(node.run())
        training = group.create_task(asyncio.to_thread(train, wire.address, loop))
        step = 0
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].step > step:
                step = status.policies[0].step
                wire.cut()
    [account] = json.loads((tmp_path / "run/status.json").read_text())["books"]
    end, _ = training.result()
    assert end.batch_count == STEPS
    assert serving.result().state is RunState.DONE
    assert wire.cut_count >= STEPS
    assert account["balanced"]


async def test_an_operator_sees_and_steers_the_run(tmp_path, start_node, loop):
    recipe = make_recipe(tmp_path)
    async with (
        hub_of(recipe, tmp_path) as (_, address),
        ControlClient(address, token="operator") as control,
        asyncio.TaskGroup() as group,
    ):
        node, _ = start_node(recipe, address)
        group.create_task(node.run())
        await control.pause_run()
        assert (await control.get_run()).state is RunState.PAUSED
        await control.resume_run()
        training = group.create_task(asyncio.to_thread(train, address, loop))
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].step >= 2:
                break
        [account] = await control.ledger.accounts()
        assert account.is_balanced
        trained = RolloutFilter(places=(RolloutPlace.TRAINED,), min_reward=5)
        records = [record async for record in control.ledger.rollouts(trained, limit=3)]
        assert len(records) == 3
        assert min(record.rollout.reward for record in records) >= 5
        assert [letter async for letter in control.ledger.dead_letters()] == []
        [suite] = await control.evals.suites()
        assert suite.suite == "suite"
        await control.stop_run(StopMode.DRAIN)
    end, _ = training.result()
    assert end.batch_count <= STEPS
