"""The gateway as a process of its own."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import httpx
import pytest

from astraflow.config.loader import dump_recipe
from astraflow.config.policies import ModelConfig, WarmUp
from astraflow.testing.recipes import small_recipe
from astraflow.trainers.warm_up import ensure_model

from .peers.dataflow import RaasClient, register


@asynccontextmanager
async def command(recipe, folder, *arguments):
    """Run `astraflow gateway`; yield what it says of itself, and the process."""
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    kind, *options = arguments
    tokens = {"ASTRAFLOW_JOIN_TOKEN": "join", "ASTRAFLOW_OPERATOR_TOKEN": "operator"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "astraflow", "gateway", kind, str(path), *options, "--port", "0", "--json"),
        env={**os.environ, **tokens, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield json.loads(await process.stdout.readline()), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_the_command_serves_until_it_is_told_to_end(serving, tmp_path):
    async with (
        serving(node=False) as (run, _),
        command(run.recipe, tmp_path, "serve", "--hub", run.address) as (told, process),
    ):
        async with httpx.AsyncClient() as client:
            status = (await client.get(f"http://{told['address']}/status")).json()
        assert status["agents"]["default"]["trainer_ready"] is False
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.slow
async def test_a_node_serves_a_dataflow_until_it_is_told_to_end(tmp_path):
    def drive(told):
        raas = RaasClient(f"http://{told['address']}")
        register(raas, "default", workflow_cls="single_turn", n_samples=2)
        data = {"prompt": "bca>", "answer": "abc"}
        raas.post("/submit", {"data": data, "workflow_id": "default"})
        [item] = raas.post("/pull", {"timeout": 100})
        return item["result"]

    warm_up = WarmUp(tutor="letter_sort:SortTutor", step_count=1, batch_size=4)
    model = ensure_model(ModelConfig(warm_up=warm_up), seed=0, cache_dir=tmp_path)
    changes = {"policies.solver.model.path": str(model)}
    recipe = small_recipe(tmp_path, scorer="exact", changes=changes)
    async with command(recipe, tmp_path, "raas", "--legacy-pickle") as (told, process):
        result = await asyncio.to_thread(drive, told)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert result["n_trajs"] == 2
    [sequence] = result["trajectories"][0]["sequences"]
    assert set(sequence["versions"][sequence["loss_mask"] == 1].tolist()) == {0}
