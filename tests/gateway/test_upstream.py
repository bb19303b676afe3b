"""The published system, unmodified, on runs of ours.

git clone https://github.com/Infini-AI-Lab/astraflow CLONE
scripts/install_upstream.sh VENV
ASTRAFLOW_UPSTREAM=CLONE ASTRAFLOW_UPSTREAM_PYTHON=VENV/bin/python pytest -m upstream

With ASTRAFLOW_RECORD=1 too, what its roles say is written to golden/: test_golden.py says it again
where there is no clone.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
from asyncio.subprocess import PIPE
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from .conftest import bits_of, weights_of
from .peers.tap import Tap, Wire, encoded
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


@pytest.fixture
def closing():
    """Closes what it is given at the end."""
    with ExitStack() as stack:
        yield lambda each: stack.enter_context(contextlib.closing(each))


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


async def test_the_published_trainer_trains_on_our_run(serving, closing):
    """Its client asks for batches, its sender pushes weights: deltas from the second on."""
    step_count = 24
    patient = {"hub.patience_s": 60}
    async with serving(step_count=step_count, recipe=patient) as (run, gateway):
        port, wires = free_port(), []
        asks = closing(Tap(gateway.address))
        sends = closing(Tap(f"127.0.0.1:{port}", partial(rewired, closing, wires)))
        arguments = (f"http://{asks.address}", port, step_count, 4, sends.address)
        async with started("trainer", *arguments) as process:
            steps, delta_count = await steps_of(process, step_count, no_wait)
        await run.finish()
        [account] = run.accounts()
        record("trainer", exchanges=asks.exchanges)
        pushed = [[encoded(wire.sent[0]) for wire in pair] for pair in wires]
        record("sender", exchanges=sends.exchanges, transfers=pushed[:4])
        engine = run.nodes["raas-1"].engine
        assert np.array_equal(bits_of(engine), weights_of(engine.version))
    assert [step["rows"] for step in steps] == [4] * step_count
    assert delta_count == step_count - 1
    assert account.trained_count == 4 * step_count


async def test_the_published_raas_serves_our_run(serving, sender, closing):
    """Every version that it loads was pulled, bit by bit; its rollouts are trained on."""
    step_count, loads = 50, []

    async def note(process):
        loads.extend([DIGESTS[line["digest"]] async for line in told(process)])

    async with serving(step_count=step_count, node=False, recipe={"hub.patience_s": 60}) as (
        run,
        gateway,
    ):
        url = f"http://{gateway.address}"
        port, senders = free_port(), {}
        answers_it = closing(Tap(f"127.0.0.1:{port}", partial(through, closing, senders)))
        async with started("raas", port, url, answers_it.address) as process:
            noting = asyncio.create_task(note(process))
            await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), step_count)
            await run.finish()
            [account] = run.accounts()
            process.terminate()
            await noting
        record("raas", exchanges=answers_it.exchanges)
        [sender_tap] = senders.values()
        record("receiver", exchanges=sender_tap.exchanges)
    assert account.trained_count == 4 * step_count
    assert account.is_balanced
    assert loads == sorted(set(loads))
    assert len(loads) >= 20


async def test_the_published_dataflow_drives_our_nodes(driven, closing):
    """Its trainer trains on rollouts of two nodes; each pulls deltas of its sender."""
    port, step_count = free_port(), 50
    taps = {}
    serves = closing(Tap(f"127.0.0.1:{port}", partial(through, closing, taps)))
    url = f"http://{serves.address}"
    async with started("dataflow", port) as dataflow, asyncio.TaskGroup() as group:
        reading = group.create_task(drain(dataflow))
        await answers(f"{url}/status")
        async with (
            driven(dataflow=url, uid="ours-0") as (_, first),
            driven(dataflow=url, uid="ours-1") as (_, second),
            started("trainer", url, free_port(), step_count, 4) as process,
        ):

            async def reached(version):
                """Wait until both have what the trainer has."""
                wanted = weights_of(version).tobytes()
                async with asyncio.timeout(60):
                    for engine in (first, second):
                        while engine.tensors["w"].tobytes() != wanted:  # noqa: ASYNC110 - polled
                            await asyncio.sleep(0.01)

            steps, delta_count = await steps_of(process, step_count, reached)
        reading.cancel()
    asks = next(iter(taps.values()))
    record("dataflow", exchanges=asks.exchanges, answers=serves.exchanges)
    assert [step["rows"] for step in steps] == [4] * step_count
    assert delta_count == 2 * (step_count - 1)


def rewired(closing, wires, path, fields):
    """Put wires into the addresses that a receiver registers."""
    if path != "/register_sglang_instance":
        return False
    host, port = fields["session_ids"][0].split(":")
    ends = (host, int(port)), (fields["zmq_endpoint"], fields["zmq_port"])
    pair = [closing(Wire(*end)) for end in ends]
    wires.append(pair)
    fields["session_ids"] = [f"127.0.0.1:{pair[0].port}"]
    fields["zmq_endpoint"], fields["zmq_port"] = "127.0.0.1", pair[1].port
    return True


def through(closing, taps, path, fields):
    """Put a tap into the address of a sender, or of a RaaS."""
    name = {"/notify_version": "sender_endpoint", "/register_raas": "raas_url"}.get(path)
    if name is None or name not in fields:
        return False
    address = fields[name].removeprefix("http://")
    if address not in taps:
        taps[address] = closing(Tap(address))
    fields[name] = fields[name].replace(address, taps[address].address)
    return True


def record(name, **kept):
    if os.environ.get("ASTRAFLOW_RECORD"):
        path = HERE.parent / "golden" / f"{name}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")


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
