"""The gateway as a process of its own."""

import asyncio
import json
import os
import signal
import sys

import httpx
import pytest

from astraflow.config.loader import dump_recipe


@pytest.mark.slow
async def test_the_command_serves_until_it_is_told_to_end(serving, tmp_path):
    async with serving(node=False) as (run, _):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump_recipe(run.recipe))
        command = ["gateway", "serve", str(recipe), "--hub", run.address, "--port", "0", "--json"]
        tokens = {"ASTRAFLOW_JOIN_TOKEN": "join", "ASTRAFLOW_OPERATOR_TOKEN": "operator"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "astraflow", *command),
            env={**os.environ, **tokens, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        address = json.loads(await process.stdout.readline())["address"]
        async with httpx.AsyncClient() as client:
            status = (await client.get(f"http://{address}/status")).json()
        assert status["agents"]["default"]["trainer_ready"] is False
        process.send_signal(signal.SIGTERM)
        await process.communicate()
        assert process.returncode == 0
