"""Two policies as adapters of one model, trained over one engine, in a real run."""

import asyncio
from functools import partial

import numpy as np
import pytest
from letter_sort import prompt_rows
from safetensors.numpy import load_file

from astraflow.config.recipe import EngineSettings, Lora
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.engines.building import build_adapter_engines
from astraflow.engines.embedded import load_tokenizer
from astraflow.raas.policies import ServedModel
from astraflow.testing import small_recipe, start_run
from astraflow.testing.nodes import make_node
from astraflow.trainers.main import run_engine
from astraflow.trainers.model_files import save_model
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.workflows.tutors import write_tokenizer

pytestmark = pytest.mark.slow

POLICIES = ("solver", "verifier")
LORA = {"rank": 4, "alpha": 8.0}
STEPS = 3
ALPHABET = "abcdefghij>?yn"


@pytest.fixture
def base(tmp_path, make_model):
    write_tokenizer(tmp_path / "tokenizer", ALPHABET)
    module = make_model(vocab_size=len(ALPHABET) + 3).module
    save_model(module, tmp_path / "base", companions_of=tmp_path / "tokenizer")
    return tmp_path / "base"


@pytest.fixture
def recipe(tmp_path, base):
    of_each = {
        "model": {"path": str(base), "lora": LORA},
        # Every row moves the weights, whatever its reward.
        "trainer.loss.surrogate": "sft",
        "trainer.optimizer.learning_rate": 1e-2,
        "sampling.max_new_tokens": 4,
    }
    changes = {f"policies.{policy}.{key}": v for policy in POLICIES for key, v in of_each.items()}
    asked = {"verify": {"text": "{prompt}{answer}?"}, "approve": "y", "reject": "n"}
    changes["workflows.main.options"] = asked
    rows = [dict(row) for row in prompt_rows(64, held_out=False, seed=0)]
    return small_recipe(
        tmp_path,
        workflow="solver_verifier",
        scorer="letter_sort:LetterSort",
        prompts=rows,
        policies=POLICIES,
        changes=changes,
    )


def node_of(run, base):
    settings, lora = EngineSettings(device="cpu"), Lora(**LORA)
    engines = build_adapter_engines(base, settings, dict.fromkeys(POLICIES, lora))
    tokenizer = load_tokenizer(base)
    return make_node(
        run.recipe,
        hub=run.address,
        token=run.join_token,
        name="node",
        capacity=16,
        models={
            policy: ServedModel(engine=engine, tokenizer=tokenizer)
            for policy, engine in engines.items()
        },
    )


def adapters(folder, policy, step):
    found = load_file(RunDir(folder).checkpoint(policy, step) / "adapter_model.safetensors")
    return {name: array.copy() for name, array in found.items()}


def differ(one, other):
    return any(not np.array_equal(one[name], other[name]) for name in one)


async def test_two_adapters_learn_from_batches_of_their_own(tmp_path, base, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = asyncio.create_task(node_of(run, base).run())
        for policy in POLICIES:
            settings = recipe.policies[policy].trainer
            engine = TorchEngine(settings, model_dir=base, lora=Lora(**LORA))
            train = partial(run_engine, engine, hub=run.address, token=run.join_token)
            run.add_thread(
                partial(train, policy=policy, settings=settings, run_dir=tmp_path / policy)
            )
        status = await run.finish(timeout_s=280)
        await node
    assert [policy.step for policy in status.policies] == [STEPS, STEPS]
    rows = read_json_lines(run.run_dir.metrics)
    last = {}
    for policy in POLICIES:
        first, last[policy] = (adapters(tmp_path / policy, policy, step) for step in (0, STEPS))
        assert differ(first, last[policy])
        sizes = [row["weights/bytes"] for row in rows if row["policy"] == policy]
        nbytes = 2 * sum(each.size for each in first.values())  # in bf16
        # A patch has positions, too.
        assert 0 < max(sizes) < 2 * nbytes
    assert differ(*last.values())
