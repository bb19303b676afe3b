"""What the HTTP gateway adds to the hand-over of a batch, and how many small requests it answers.

Hub and gateway are processes on the first core; a node and a trainer whose work costs nothing drive
them from the other. Batches are 256 rollouts of 4,000 tokens.

- `grpc`: from the write of the last rollout until a trainer of the contract has parsed the batch.
- `http`: from the same write until all of the answer to `GET /batch` was read; `loads_ms` is what
  `pickle.loads` takes after that.
- `requests`: small requests per second over 8 connections, without and with a call to the hub.

    python benchmarks/gateway.py --batches 12 --json gateway.json
"""

import argparse
import asyncio
import http.client
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, JoinPool, ServedPolicy
from astraflow.core.tasks import RegisteredCode
from astraflow.core.tensors import Dtype
from astraflow.core.versions import VersionReport, VersionState
from astraflow.gateway.http import BodyRules, serve_app
from astraflow.gateway.sending import HeldVersion, Pusher, Sender, SenderOffer, sender_app
from astraflow.gateway.weight_buffer import BufferPlan
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.peers import DialRules
from astraflow.wire import dataflow, versions
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub
from hub_ends.handover import _send_all_but_one, measure_handover
from hub_ends.members import Members
from hub_ends.process import GROUP_SIZE, GROUPS_PER_BATCH, POLICY, TOKEN, HubProcess, running_hub

BARS: Final = {"added_p50_ms": 150.0, "requests_per_s": 500.0}
_PLAN: Final = BufferPlan.of([("w", Dtype.BF16, (1000,))])
_CONNECTIONS: Final = 8


class HttpMembers(Members):
    """The node alone: its trainer speaks HTTP."""

    async def join(self) -> None:
        """Open the node's session."""
        join = JoinPool(
            name="node",
            contract=Contract(),
            capacity=1 << 16,
            policies=(ServedPolicy(policy_id=PolicyId(POLICY), max_context_token_count=1 << 16),),
            codes=(RegisteredCode(name="single_turn"),),
        )
        answer = await RaasServiceStub(self.channel).JoinPool(
            dataflow.encode_join_pool(join), metadata=bearer(TOKEN)
        )
        self.raas = session_metadata(answer.session.token)

    async def live(self, version: int) -> None:
        """Say that a version is live."""
        self.version = version
        report = VersionReport(policy_id=PolicyId(POLICY), version=version, state=VersionState.LIVE)
        await VersionServiceStub(self.channel).ReportVersion(
            versions.encode_version_report(report), metadata=self.raas
        )


class HttpTrainer:
    """A trainer as existing ones are; blocks."""

    def __init__(self, address: str) -> None:
        self._address = address

    def post(self, path: str, fields: dict[str, Any]) -> None:
        """Send a dict."""
        self._ask("POST", path, pickle.dumps(fields))

    def batch(self, version: int) -> tuple[bytes, float]:
        """Return the answer to /batch, and when all of it was there."""
        raw = self._ask("GET", f"/batch?version={version}")
        return raw, time.perf_counter()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        headers = {"content-type": "application/octet-stream"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(raw.decode())
        return raw


async def measure_http(
    hub: HubProcess, gateway: "GatewayProcess", *, token_count: int, batch_count: int
) -> dict[str, float]:
    """Return how long batches took over HTTP, the first one left out."""
    sender = Sender(POLICY)
    spans: list[float] = []
    loads: list[float] = []
    async with dial(hub.address) as channel, sending(sender) as endpoint:
        members, trainer = HttpMembers(channel, token_count), HttpTrainer(gateway.address)
        hold(sender, 0)
        ready = {"model_id": POLICY, "sender_endpoint": endpoint, "recovered_version": 0}
        await asyncio.to_thread(trainer.post, "/ready", ready)
        await members.join()
        await members.live(0)
        tasks, rollouts = await members.open_tasks(), members.open_rollouts()
        began_s = gateway.cpu_s
        for step in range(batch_count + 1):
            last = await _send_all_but_one(members, tasks, rollouts)
            asked = asyncio.create_task(asyncio.to_thread(trainer.batch, step))
            started = time.perf_counter()
            await rollouts.write(last)
            await rollouts.read()
            raw, ended = await asked
            spans.append(1e3 * (ended - started))
            answer = pickle.loads(raw)
            loads.append(1e3 * (time.perf_counter() - ended))
            assert len(answer["batch"]["input_ids"]) == GROUPS_PER_BATCH * GROUP_SIZE
            hold(sender, step + 1)
            notify = {"version": step + 1, "model_id": POLICY}
            await asyncio.to_thread(trainer.post, "/notify_version", notify)
            await members.live(step + 1)
        used_s = gateway.cpu_s - began_s
        for stream in (tasks, rollouts):
            stream.cancel()
    return {
        "handover_p50_ms": median(spans[1:]),
        "loads_p50_ms": median(loads[1:]),
        "gateway_cpu_ms_per_batch": 1e3 * used_s / len(spans),
        "body_nbytes": len(raw),
        "batches": batch_count,
    }


def hold(sender: Sender, version: int) -> None:
    """Have a sender offer a version."""
    flat = np.full(_PLAN.nbytes // 2, version, np.uint16).view(np.uint8)
    held = HeldVersion(version=version, plan=_PLAN, flat=flat)
    sender.offer = SenderOffer(held=held, number=version)


@asynccontextmanager
async def sending(sender: Sender) -> AsyncGenerator[str]:
    """Serve a sender; yield its address."""
    rules = BodyRules()
    async with (
        Pusher(timeout_s=30) as pusher,
        serve_app(
            sender_app(sender, pusher, rules, DialRules()), host="127.0.0.1", rules=rules
        ) as endpoint,
    ):
        yield endpoint


async def measure_requests(
    gateway: "GatewayProcess", path: str, *, seconds: float
) -> dict[str, float]:
    """Return how many requests per second were answered, and the gateway's CPU for each."""
    method = "POST" if path == "/save_buffer" else "GET"
    request = f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n".encode()
    ends = time.perf_counter() + seconds
    began_s = gateway.cpu_s
    asking = (_ask(gateway.address, request, ends) for _ in range(_CONNECTIONS))
    count = sum(await asyncio.gather(*asking))
    return {"per_s": count / seconds, "cpu_ms": 1e3 * (gateway.cpu_s - began_s) / count}


async def _ask(address: str, request: bytes, ends: float) -> int:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    count = 0
    while time.perf_counter() < ends:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head, head
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)
        count += 1
    writer.close()
    return count


class GatewayProcess:
    """A gateway in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process = psutil.Process(process.pid)
        self.address = address

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def running_gateway(hub: HubProcess) -> Generator[GatewayProcess]:
    """Run a gateway beside a hub until the block ends."""
    recipe = hub.run_dir.root.parent / "recipe.yaml"
    command = ["gateway", "serve", str(recipe), "--hub", hub.address, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "astraflow", *command, "--legacy-pickle", "--json"],
        env={**os.environ, "ASTRAFLOW_JOIN_TOKEN": TOKEN, "ASTRAFLOW_OPERATOR_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    psutil.Process(process.pid).cpu_affinity([0])
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        yield GatewayProcess(process, address)
    finally:
        process.terminate()
        process.wait(20)


def median(values: list[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in one event loop: gRPC keeps to the first one that it sees."""
    rows: dict[str, Any] = {}
    shape = {"token_count": options.tokens, "batch_count": options.batches}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_hub(Path(folder), "process", max_staleness=0) as hub,
    ):
        rows["grpc"] = await measure_handover(hub, **shape)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_hub(Path(folder), "process", max_staleness=0) as hub,
        running_gateway(hub) as gateway,
    ):
        rows["http"] = await measure_http(hub, gateway, **shape)
        rows["requests"] = {
            path: await measure_requests(gateway, path, seconds=options.seconds)
            for path in ("/save_buffer", "/status")
        }
    rows["added_p50_ms"] = rows["http"]["handover_p50_ms"] - rows["grpc"]["handover_p50_ms"]
    return rows


def main() -> None:
    """Print what was measured, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    psutil.Process().cpu_affinity([1 % (os.cpu_count() or 1)])
    before = os.getloadavg()
    rows = asyncio.run(measure(options))
    print(json.dumps({"load_average": before, **rows}))
    if options.json:
        report = {"bars": BARS, "load_average": before, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
