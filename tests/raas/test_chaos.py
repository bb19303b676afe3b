"""Nodes that join, leave, die, stand still and are cut off at random: every run ends well."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress

import pytest
from structlog.testing import capture_logs

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState
from astraflow.raas.policies import ServedModel
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, start_run
from astraflow.testing.nodes import LiveNode, make_node
from astraflow.weights.serve.server import RelayServer
from astraflow.workflows.protocol import Score
from astraflow.workflows.registry import workflow

pytestmark = pytest.mark.long

MOST_NODES = 4
DISTURBANCES = (
    *("drain", "stop", "kill", "cut", "unplug"),
    *("silence", "hang", "refuse", "hold"),
)
METHODS = ("StreamTasks", "ReportVersion", "WatchVersions", "EndSession", "JoinPool", "NackTask")


@workflow("test_chaos")
class Says:
    """Has every policy of the run say something."""

    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        for policy in episode.policy_ids:
            talk = episode.trajectory(policy)
            talk.observe(episode.prompt.fields["prompt"])
            text = (await talk.sample()).text
        return Score(reward=float(text[0]))


def made_up_recipe(folder, chance):
    policies = ("solver",) if chance.random() < 0.5 else ("solver", "verifier")
    changes = {
        "rollouts.group_size": chance.choice([2, 4]),
        "rollouts.keep_together": chance.random() < 0.5,
        "rollouts.timeout_s": chance.choice([2, 20]),
        "rollouts.max_lost": 1000,
        "hub.session_ttl_s": chance.choice([0.5, 1, 3]),
        "evals.suite": {
            "data_sets": [{"data_set": "train", "workflow": "main"}],
            "every": chance.choice([1, 2, 5]),
            "pool_share": chance.choice([0.2, 1.0]),
        },
    }
    for policy in policies:
        trainer = f"policies.{policy}.trainer"
        # One policy ends long before the other.
        changes[f"{trainer}.step_count"] = chance.choice([4, 15, 25])
        changes[f"{trainer}.groups_per_batch"] = chance.choice([1, 2, 4])
        changes[f"{trainer}.max_staleness"] = chance.choice([0, 1, 2, 6])
    prompts = [{"prompt": str(100 + n)} for n in range(chance.choice([3, 16, 64]))]
    return small_recipe(
        folder, workflow="test_chaos", prompts=prompts, policies=policies, changes=changes
    )


class Pool:
    """Nodes of a run, and what may happen to one of them."""

    def __init__(self, run, chance, exits):
        self.run = run
        self.chance = chance
        self.exits = exits
        self.nodes = []
        self.count = 0

    @property
    def live(self):
        return [each for each in self.nodes if not each.left.done()]

    async def add(self):
        self.count += 1
        tokenizer = CharTokenizer("0123456789")
        policies, token_s = self.run.recipe.policies, self.chance.choice([0, 0.002, 0.01])
        engines = {each: SmallEngine(tokenizer, token_s=token_s) for each in policies}
        models = {
            policy: ServedModel(engine=engine, tokenizer=tokenizer)
            for policy, engine in engines.items()
        }
        line, relays = await self.run.open_line(), None
        if self.chance.random() < 0.5:
            relays = RelayServer([*engines])
            await relays.start()
            self.exits.push_async_callback(relays.close)
        name = f"raas-{self.count}"
        node = make_node(
            self.run.recipe,
            hub=line.address,
            token=self.run.join_token,
            name=name,
            capacity=self.chance.choice([1, 4, 16]),
            models=models,
            relays=relays,
        )
        left = asyncio.create_task(node.run())
        self.nodes.append(LiveNode(name=name, node=node, engines=engines, line=line, left=left))

    async def disturb(self):
        """Do something to a node, which is over soon or for good."""
        chance, later = self.chance, asyncio.get_running_loop().call_later
        node = chance.choice(self.live)
        engine = chance.choice([*node.engines.values()])
        match chance.choice(DISTURBANCES):
            case "drain":
                node.node.drain()
            case "stop":
                node.node.stop()
            case "kill":
                await node.kill()
            case "cut":
                node.line.cut()
            case "unplug":
                node.line.unplug()
                later(chance.choice([0.1, 0.6, 1.5]), node.line.plug)
            case "silence":
                node.line.silence()
                later(chance.choice([0.1, 1, 2]), node.line.release, "KeepAlive")
            case "hang":
                engine.open.clear()
                later(chance.choice([0.05, 0.5, 1.5]), engine.open.set)
            case "refuse":
                engine.refusals.append(AstraflowError(Reason.NOT_READY, "as the test asked for"))
            case "hold":
                method = chance.choice(METHODS)
                node.line.hold(method)
                later(chance.choice([0.1, 0.8]), node.line.release, method)

    async def replace(self):
        """Keep a node there, until cancelled."""
        while True:
            if not self.live:
                await self.add()
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("seed", range(8))
async def test_a_run_ends_and_its_books_are_exact_whatever_nodes_do(seed, tmp_path):
    chance = random.Random(seed)
    recipe = made_up_recipe(tmp_path, chance)
    async with AsyncExitStack() as exits:
        logs = exits.enter_context(capture_logs())
        run = await exits.enter_async_context(start_run(recipe, run_dir=tmp_path / "run"))
        pool = Pool(run, chance, exits)
        trained = [
            run.add_trainer(policy, step_s=chance.choice([0, 0.01, 0.05]))
            for policy in recipe.policies
        ]
        for _ in range(chance.choice([20, 60, 120])):
            if not pool.live or (len(pool.live) < MOST_NODES and chance.random() < 0.2):
                await pool.add()
            await pool.disturb()
            await asyncio.sleep(chance.choice([0, 0.01, 0.05, 0.2]))
            if run.serving.done():
                break
        replacing = asyncio.create_task(pool.replace())
        status = await run.finish(timeout_s=200)
        replacing.cancel()
        for node in pool.nodes:
            # One that joined when the run was over hears of no hub.
            with suppress(AstraflowError, asyncio.CancelledError):
                await node.left
    assert status.state is RunState.DONE
    assert all(account.is_balanced for account in run.accounts())
    steps = [recipe.policies[policy].trainer.step_count for policy in recipe.policies]
    assert [each.result().end.batch_count for each in trained] == steps
    assert [entry for entry in logs if "exc_info" in entry or "exception" in entry] == []
