"""A run with a gateway, and peers that know nothing of this project."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from astraflow.config.recipe import Recipe
from astraflow.gateway.http import BodyRules
from astraflow.gateway.raas.node import RaasSettings
from astraflow.gateway.raas.serve import serve_raas
from astraflow.gateway.serve import serve_gateway
from astraflow.gateway.settings import GatewaySettings, first_models
from astraflow.raas.policies import ServedModel
from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.recipes import one_turn, small_recipe
from astraflow.testing.run import start_run
from astraflow.workflows.registry import workflow

from .peers.sender import PeerSender

SIZE = 100


workflow("gateway_digits")(one_turn(lambda text: float(sum(map(str.isdigit, text)))))


def weights_of(version):
    """bf16 bits u16[100]: few differ from version to version."""
    values = torch.zeros(SIZE)
    values[: version + 1] = torch.arange(1.0, version + 2)
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def settings_of(run, **changes):
    known = {
        "recipe": run.recipe,
        "hub": run.address,
        "token": run.join_token,
        "operator_token": run.operator_token,
        "models": first_models(run.recipe, {}),
        "rules": BodyRules(reads_pickles=True, max_nbytes=1 << 20, timeout_s=2.0),
    }
    return GatewaySettings(**(known | changes))


def without_a_run(*, http=None, **changes):
    """Settings of a gateway whose hub is not there."""
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "policies": {
                "solver": {
                    "model": {"warm_up": {"tutor": "letter_sort:SortTutor"}},
                    "trainer": {"groups_per_batch": 2},
                }
            },
            "data": {"train": {"path": "train.jsonl"}},
            "workflows": {"main": {"name": "single_turn"}},
            "rollouts": {"data_set": "train", "workflow": "main", "group_size": 2},
            "hub": {"patience_s": 0.2},
            "http": http or {},
        }
    )
    return GatewaySettings(recipe=recipe, hub="127.0.0.1:1", token="join", **changes)


@pytest.fixture
def sender():
    """The weight sender of an existing trainer, at `weights_of(0)`."""
    sender = PeerSender()
    sender.hold(0, weights_of(0))
    yield sender
    sender.close()


@pytest.fixture
def serving(tmp_path):
    """Starts a run whose policies begin with `weights_of(0)`, and a gateway."""

    @asynccontextmanager
    async def start(*, step_count=3, node=True, recipe=None, **changes):
        bits = torch.from_numpy(weights_of(0)).view(torch.bfloat16)
        save_file({"w": bits}, tmp_path / "model.safetensors")
        changed = {
            "policies.solver.trainer.step_count": step_count,
            "hub.patience_s": 5,
            "http.batch_timeout_s": 20,
        }
        changed |= recipe or {}
        recipe = small_recipe(tmp_path, workflow="gateway_digits", changes=changed)
        async with start_run(recipe, run_dir=tmp_path / "run") as run:
            if node:
                await run.add_node()
            async with serve_gateway(settings_of(run, **changes)) as gateway:
                yield run, gateway

    return start


def bits_of(engine):
    """u16[100]: what an engine holds after all of its swaps."""
    held = np.zeros(SIZE, np.uint16)
    for update in engine.swaps:
        for tensor in update.tensors:
            where = slice(None) if tensor.indices is None else tensor.indices
            held[where] = tensor.values
    return held


@pytest.fixture
def driven(tmp_path):
    """Starts a node that a Dataflow drives, whose policy begins with `weights_of(0)`."""

    @asynccontextmanager
    async def start(*, capacity=16, dataflow=None, token_s=0.0, changes=None, uid="ours"):
        bits = torch.from_numpy(weights_of(0)).view(torch.bfloat16)
        save_file({"w": bits}, tmp_path / "model.safetensors")
        changed = {"raas.capacity": capacity} | (changes or {})
        recipe = small_recipe(tmp_path, workflow="gateway_digits", changes=changed)
        settings = RaasSettings(
            recipe=recipe,
            uid=uid,
            models={"solver": tmp_path},
            rules=BodyRules(reads_pickles=True, max_nbytes=1 << 20, timeout_s=2.0),
        )
        engine = SmallEngine(CharTokenizer(), token_s=token_s)
        models = {"solver": ServedModel(engine=engine, tokenizer=CharTokenizer())}
        async with serve_raas(settings, models, dataflow=dataflow) as serving:
            yield serving, engine

    return start
