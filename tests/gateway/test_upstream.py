"""The published system, unmodified, on runs of ours.

git clone https://github.com/Infini-AI-Lab/astraflow CLONE
scripts/install_upstream.sh VENV
ASTRAFLOW_UPSTREAM=CLONE ASTRAFLOW_UPSTREAM_PYTHON=VENV/bin/python pytest -m upstream
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from .conftest import bits_of, weights_of
from .peers.trainer import PeerTrainer
from .test_trainer import train

HERE = Path(__file__).parent / "upstream"
PYTHON, CLONE = (os.environ.get(f"ASTRAFLOW_UPSTREAM{end}") for end in ("_PYTHON", ""))
DIGESTS = {hashlib.sha256(weights_of(v).tobytes()).hexdigest(): v for v in range(60)}

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not (PYTHON and CLONE), reason="ASTRAFLOW_UPSTREAM is not set"),
    pytest.mark.timeout(600),
]


@asynccontextmanager
async def started(name, *arguments):
    """Start a process of the published system; ends with the block."""
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(HERE / f"{name}.py"),
        *map(str, arguments),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": CLONE, "HF_HUB_OFFLINE": "1", "no_proxy": "*"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def told(process):
    """Yield what it tells, a line of JSON each; what else it prints is passed over."""
    async for line in process.stdout:
        if line.startswith(b"{"):
            yield json.loads(line)


async def steps_of(process, step_count, reached):
    """Have the trainer take its steps; returns what it tells and how many deltas it sent."""
    steps, delta_count = [], 0
    while len(steps) < step_count:
        line = await process.stdout.readline()
        assert line, "it ended"
        delta_count += b"Delta TCP to" in line
        if line.startswith(b"{"):
            steps.append(json.loads(line))
            await reached(len(steps))
            process.stdin.write(b"\n")
            await process.stdin.drain()
    async for line in process.stdout:
        delta_count += b"Delta TCP to" in line
    assert await process.wait() == 0
    return steps, delta_count


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def test_the_published_trainer_trains_on_our_run(serving):
    """Its client asks for batches, its sender pushes weights: deltas from the second on."""
    step_count = 24
    async with serving(step_count=step_count, patience_s=60.0) as (run, gateway):
        url = f"http://{gateway.address}"
        async with started("trainer", url, free_port(), step_count, 4) as process:
            steps, delta_count = await steps_of(process, step_count, no_wait)
        await run.finish()
        [account] = run.accounts()
        engine = run.nodes["raas-1"].engine
        assert np.array_equal(bits_of(engine), weights_of(engine.version))
    assert [step["rows"] for step in steps] == [4] * step_count
    assert delta_count == step_count - 1
    assert account.trained_count == 4 * step_count


async def test_the_published_raas_serves_our_run(serving, sender):
    """Every version that it loads was pulled, bit by bit; its rollouts are trained on."""
    step_count, loads = 50, []

    async def note(process):
        loads.extend([DIGESTS[line["digest"]] async for line in told(process)])

    async with serving(step_count=step_count, node=False, patience_s=60.0) as (run, gateway):
        url = f"http://{gateway.address}"
        async with started("raas", free_port(), url) as process:
            noting = asyncio.create_task(note(process))
            await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), step_count)
            await run.finish()
            [account] = run.accounts()
            process.terminate()
            await noting
    assert account.trained_count == 4 * step_count
    assert account.is_balanced
    assert loads == sorted(set(loads))
    assert len(loads) >= 20


async def test_the_published_dataflow_drives_our_nodes(pooling):
    """Its trainer trains on rollouts of ours; the pool pulls deltas of its sender."""
    port, step_count = free_port(), 50
    url = f"http://127.0.0.1:{port}"
    async with started("dataflow", port) as dataflow, asyncio.TaskGroup() as group:
        reading = group.create_task(drain(dataflow))
        await answers(f"{url}/status")
        async with (
            pooling(nodes=2, dataflow=url) as (_, nodes),
            started("trainer", url, free_port(), step_count, 4) as process,
        ):

            async def reached(version):
                """Wait until all nodes have what the trainer has."""
                wanted = weights_of(version).tobytes()
                async with asyncio.timeout(60):
                    for live in nodes:
                        while bits_of(live.engine).tobytes() != wanted:  # noqa: ASYNC110 - polled
                            await asyncio.sleep(0.01)

            steps, delta_count = await steps_of(process, step_count, reached)
        reading.cancel()
    assert [step["rows"] for step in steps] == [4] * step_count
    assert delta_count == step_count - 1


async def no_wait(_):
    pass


async def drain(process):
    async for _ in process.stdout:
        pass


async def answers(url):
    async with httpx.AsyncClient() as client, asyncio.timeout(100):
        while True:
            try:
                return await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
