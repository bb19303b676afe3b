"""A trainer whose copy of the weights is damaged in memory, in a run of real members."""

import asyncio
import threading

import numpy as np
import pytest

from astraflow.client.trainer import DamageReport, PublishOrder, TrainerClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import WeightEndpoint
from astraflow.testing import small_recipe, start_run
from astraflow.weights.publish.background import Scrub
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import RelayServer, WeightServer

DIGITS = "0123456789"
LAYOUT = Layout.of([("w", Dtype.BF16, (64, 64))])


class Trainer:
    """Publishes its weights when it is told to, and when it is asked.

    Its scrub looks once and then never again by itself: only a doubt lets it.
    """

    def __init__(self, run):
        self.run = run
        self.rng = np.random.default_rng(3)
        self.publisher = WeightPublisher("solver", LAYOUT)
        self.tensors = {"w": self.rng.integers(0, 1 << 15, (64, 64)).astype(np.uint16)}
        self.version = -1
        self.is_served = threading.Event()
        self.is_memory_bad = False

    def train(self):
        with (
            WeightServer(self.publisher, loop=self.run.loop) as server,
            TrainerClient(
                hub=self.run.address,
                token=self.run.join_token,
                register=RegisterTrainer(
                    policy_id="solver",
                    name="trainer-solver",
                    contract=Contract(),
                    groups_per_batch=2,
                    weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
                ),
                loop=self.run.loop,
            ) as client,
            Scrub(self.publisher, damaged=client.order_publish, time_share=1e-9) as scrub,
        ):
            client.on_transfer_token(server.set_transfer_token)
            self.publish(client, scrub)
            assert self.is_served.wait(200)
            self.damage()
            self.tensors["w"][:, :8] += 1
            self.publish(client, scrub)
            for item in client.items():
                match item:
                    case PublishOrder():
                        self.publish(client, scrub)
                    case DamageReport():
                        scrub.check_now(item.version)

    def damage(self):
        self.publisher.history._flat[1000] ^= 4

    def publish(self, client, scrub):
        self.version += 1
        client.publish_version(self.publisher.publish(self.version, self.tensors))
        if self.is_memory_bad:
            self.damage()
        scrub.wake()


@pytest.fixture
async def relays():
    server = RelayServer(["solver"])
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def run(tmp_path):
    recipe = small_recipe(
        tmp_path,
        workflow="test_digits",
        prompts=[{"prompt": "1"}],
        changes={"policies.solver.trainer.groups_per_batch": 2, "evals": {}},
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        yield run


async def test_nodes_go_on_from_a_whole_version_when_the_copy_is_damaged(relays, run):
    nodes = [await run.add_node(alphabet=DIGITS, relays=each) for each in (relays, None)]
    trainer = Trainer(run)
    run.add_thread(trainer.train)
    for node in nodes:
        node.engine.open.clear()
        await node.engine.until(lambda node=node: node.engine.version == 0)
    trainer.is_served.set()
    for node in nodes:
        await node.engine.until(lambda node=node: node.engine.version == 2)
    for node in nodes:
        assert [update.version for update in node.engine.swaps] == [0, 2]
        assert (node.engine.tensors["w"] == trainer.tensors["w"]).all()
    failed = nodes[0].node.runner.counters.failed + nodes[1].node.runner.counters.failed
    assert failed["solver", Reason.DIGEST_MISMATCH] in range(1, 7)
    assert trainer.version == 2
    assert trainer.publisher.scrub()


async def test_a_trainer_in_bad_memory_stops_and_says_why(run):
    node = await run.add_node(alphabet=DIGITS)
    node.engine.open.clear()
    trainer = Trainer(run)
    trainer.is_memory_bad = True
    trainer.is_served.set()
    with pytest.raises(AstraflowError, match="damaged in memory 3 times in a row") as caught:
        await asyncio.to_thread(trainer.train)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
