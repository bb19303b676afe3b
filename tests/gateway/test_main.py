"""The gateway as a process of its own."""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
from safetensors.torch import save_file

from astraflow.config.loader import dump_recipe
from astraflow.raas.node import Departure
from astraflow.raas.policies import ServedModel
from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.nodes import make_node
from astraflow.testing.recipes import small_recipe

from .peers.dataflow import RaasClient, register, until


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
async def test_nodes_join_again_where_a_gateway_died(tmp_path):
    """What was under way is gone with it, as with any RaaS: the Dataflow submits it again."""

    def drive(told):
        raas = RaasClient(f"http://{told['address']}")
        until(lambda: raas.get("/status")["status"] == "ready")
        register(raas, "default", workflow_cls="single_turn", n_samples=2)
        data = {"prompt": "row", "answer": "orw"}
        raas.post("/submit", {"data": data, "workflow_id": "default"})
        [item] = raas.post("/pull", {"timeout": 20})
        return "ok" not in item["result"]

    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ("raas", "--listen", listen, "--legacy-pickle")
    recipe = small_recipe(tmp_path, workflow="single_turn", scorer="exact")
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    async with command(recipe, tmp_path, *options) as (told, process):
        node = node_of(recipe, listen)
        running = asyncio.create_task(node.run())
        assert await asyncio.to_thread(drive, told)
        process.kill()
        await process.wait()
    async with command(recipe, tmp_path, *options) as (told, process):
        assert await asyncio.to_thread(drive, told)
        process.send_signal(signal.SIGTERM)
        assert await running is Departure.STOPPED
        assert await process.wait() == 0


def node_of(recipe, hub):
    engine, tokenizer = SmallEngine(CharTokenizer()), CharTokenizer()
    models = {"solver": ServedModel(engine=engine, tokenizer=tokenizer)}
    return make_node(
        recipe, hub=hub, token="join", name="node", capacity=8, models=models, patience_s=30.0
    )
