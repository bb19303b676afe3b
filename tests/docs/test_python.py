"""The Python of pages runs as it stands there, block after block, against real objects."""

import ast
import asyncio
import inspect
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module

import numpy as np
import pytest

from astraflow.client.raas import dial_pool
from astraflow.client.session import Held, MemberHooks
from astraflow.client.trainer import TrainerClient
from astraflow.config.loader import dump_recipe
from astraflow.core.batches import BatchOutcome
from astraflow.core.members import (
    Contract,
    JoinPool,
    RaasLoad,
    RegisterTrainer,
    ServedPolicy,
    WeightEndpoint,
)
from astraflow.core.rollouts import TURN_REWARDS
from astraflow.core.tasks import RegisteredCode, SamplingParams
from astraflow.core.tensors import Dtype, Layout
from astraflow.launch.check import check_recipe
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, start_run
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from made_up import made_up_task

from .conftest import DOCS, RECIPES, fences, files
from .test_snippets import pages_with

SETTINGS = {}
ROWS = [{"prompt": f"{n} + 2 =", "answer": f"{n + 2}", "best_move": "e4"} for n in range(9)]


def setting(name):
    """Declare what surrounds the Python of a page: yields its names, then sees what was made."""

    def add(made):
        SETTINGS[name] = asynccontextmanager(made)
        return made

    return add


@pages_with("python")
def test_all_python_runs(path):
    shown = [title for language, title, _ in fences(path) if language == "python"]
    is_tested = any(title and title.startswith("test_") for title in shown)
    assert path.name in SETTINGS or (is_tested and None not in shown) or path.name == "README.md"


@pytest.mark.parametrize("name", SETTINGS)
async def test_python_runs(name, tmp_path, monkeypatch):
    path = DOCS / name
    for title, code in files(path).items():
        (tmp_path / title).write_text(code)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, RECIPES / "trainers"):
        monkeypatch.syspath_prepend(folder)
    shown = [code for language, title, code in fences(path) if language == "python" and not title]
    async with SETTINGS[name](tmp_path) as names:
        for code in shown:
            await execute(code, names)


async def execute(code, names):
    """Run a block; one that blocks does so in a thread, beside the run."""
    for written, real in names.get("instead", {}).items():
        code = code.replace(written, real)
    compiled = compile(code, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        await eval(compiled, names)
    else:
        await asyncio.to_thread(exec, compiled, names)


@setting("losses.md")
async def turns_are_paid(folder):
    yield {}
    recipe = small_recipe(folder, workflow="my_box:Box")
    async with start_run(recipe, run_dir=folder / "run") as run:
        await run.add_node(answer=lambda text: "lock" if "lock" in text else "key")
        run.add_trainer()
        await run.finish()
    row = run.rollouts()[0].rollout.trajectories[0]
    assert row.columns[TURN_REWARDS].values.sum() == pytest.approx(0.4)


@setting("scaling.md")
async def the_maintainer_starts_what_is_missing(folder):
    names = {}
    yield names
    started = []

    async def start_node():
        started.append(await run.add_node())

    async with start_run(small_recipe(folder), run_dir=folder / "run") as run:
        await names["maintain"](run.address, run.operator_token, start_node, lambda _: True)
        assert len(started) == 1


@setting("scorers.md")
async def scorers_score_and_say_what_they_lack(folder):
    yield {}
    for scorer, words in {"my_scorers:brief": None, "my_chess:Chess": "no stockfish here"}.items():
        recipe = small_recipe(folder, scorer=scorer, prompts=ROWS)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        found = [each.what for each in check_recipe(folder / "recipe.yaml").findings]
        assert not any(scorer in what for what in found)
        assert words is None or any(words in what for what in found), found


@setting("workflows.md")
async def a_chat_is_had(folder):
    del folder
    engine = SmallEngine(answer=lambda told: "7" if told.endswith("3 + 4?") else "14")
    engine.version = 0
    port = PolicyPort(
        policy_id="solver",
        engine=engine,
        tokenizer=CharTokenizer(),
        sampling=SamplingParams(max_new_tokens=8),
    )
    names = {"episode": Episode(task=made_up_task(), sample_index=0, policies={"solver": port})}
    yield names
    assert names["reply"].text == "14"


@setting("trainers.md")
async def engines_and_loops_of_ones_own_train(folder):
    recipe = small_recipe(folder, scorer="exact", prompts=ROWS)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    async with start_run(recipe, run_dir=folder / "first") as run:
        await run.add_node()
        names = {"instead": {"10.0.0.1:7000": run.address, '"..."': '"join"'}}
        yield names
        assert (await run.finish()).policies[0].version == 3

    def train():
        learn = import_module("my_trainer").learn
        logits, trained = np.zeros(128, np.float32), []
        publisher = WeightPublisher("solver", Layout.of([("logits", Dtype.F32, (128,))]))

        def step(batch):
            trained.append(learn(logits, batch))
            count = len(trained)
            client.publish_version(publisher.publish(count, {"logits": logits}, step=count))
            client.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=count)

        with WeightServer(publisher) as server:
            place = WeightEndpoint(rank=0, endpoint=server.endpoint)
            me = RegisterTrainer(
                policy_id="solver",
                name="mine",
                contract=Contract(),
                groups_per_batch=2,
                weight_endpoints=(place,),
            )
            with TrainerClient(hub=run.address, token=run.join_token, register=me) as client:
                client.on_transfer_token(server.set_transfer_token)
                client.publish_version(publisher.publish(0, {"logits": logits}))
                names["obey"](client, step, publish=None, save=None, scrub=None)
        return len(trained)

    async with start_run(recipe, run_dir=folder / "second") as run:
        await run.add_node()
        training = run.add_thread(train)
        await run.finish()
    assert training.result() == 3


@setting("weights.md")
async def versions_go_from_a_trainer_to_a_node(folder):
    names = {}
    yield names
    engine = import_module("numpy_bigram").BigramEngine()
    node = SmallEngine(CharTokenizer())
    engine.prepare()
    engine.table[:] = np.arange(engine.size)
    join = JoinPool(
        name="mine",
        contract=Contract(),
        capacity=1,
        policies=(ServedPolicy(policy_id="solver", max_context_token_count=64),),
        codes=(RegisteredCode(name="single_turn"),),
    )
    hooks = MemberHooks(load=lambda: RaasLoad(capacity=1), held=Held, directed=lambda _: None)
    async with start_run(small_recipe(folder), run_dir=folder / "run") as run:
        run.add_thread(partial(names["train"], engine, run.address, run.join_token))
        async with dial_pool(run.address, token=run.join_token, join=join, hooks=hooks) as client:
            await client.join()
            follows = asyncio.create_task(names["follow"](client, node))
            while not node.swaps:
                await asyncio.wait([follows], timeout=0.01)
                assert not follows.done() or follows.result()
            follows.cancel()
    assert np.array_equal(node.tensors["table"].view(np.float32), engine.table)
