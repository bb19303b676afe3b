"""The hub under load: rollouts in and batches out over real gRPC, with the journal and without.

The hub is a process on one core; a node and a trainer whose work costs nothing drive it from the
other. Groups of 8 rollouts, 1,000 tokens each, in messages of up to 64 items.

    python benchmarks/hub.py --seconds 10 --json hub.json
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import yaml
from grpc import aio

from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.core.members import Contract, JoinPool, RegisterTrainer, ServedPolicy
from astraflow.core.tasks import RegisteredCode
from astraflow.core.versions import (
    CodecProfile,
    PatchInfo,
    VersionInfo,
    VersionReport,
    VersionState,
    WeightEndpoint,
)
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.rpc.channel import dial
from astraflow.wire import dataflow as wire
from astraflow.wire import weights
from astraflow.wire.fields import encode_tensor
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from astraflow_proto.dataflow.v1 import session_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.rollout.v1 import rollout_pb2, trajectory_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub

BARS: Final = {"rollouts_per_s": 2500.0, "ack_p99_ms": 50.0}
MODES: Final = {
    "none": {"kind": "none"},
    "process": {"kind": "sqlite", "durability": "process"},
    "power": {"kind": "sqlite", "durability": "power"},
}
POLICY: Final = "solver"
GROUP_SIZE: Final = 8
GROUPS_PER_BATCH: Final = 32
MAX_STALENESS: Final = 8
_ITEM_COUNT: Final = 64
_TOKEN: Final = "benchmark"
_WARM_UP_S: Final = 2.0

Row = dict[str, Any]


@dataclass
class Load:
    """A node and a trainer in one process.

    Attributes:
        channel: To the hub.
        token_count: Per rollout.
        rate: Rollouts and results that are sent per second; 0: as fast as the hub takes them.
        acks: Seconds from the write of a message to its ack, with the time of the ack.
        accepted: Rollouts that were acknowledged.
        trained: Rollouts in batches that were acknowledged.
    """

    channel: aio.Channel
    token_count: int
    rate: float
    acks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    accepted: int = 0
    trained: int = 0
    step: int = 0
    version: int = -1
    raas: Any = None
    trainer: Any = None
    items: "asyncio.Queue[raas_pb.RolloutItem]" = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        """Drive the hub until cancelled."""
        await self._register()
        await self._publish()
        async with asyncio.TaskGroup() as group:
            for part in (self._take_tasks(), self._send(), self._train(), self._keep_alive()):
                group.create_task(part)

    async def _register(self) -> None:
        request = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(),
            groups_per_batch=GROUPS_PER_BATCH,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
        )
        answer = await TrainerServiceStub(self.channel).RegisterTrainer(
            wire.encode_register_trainer(request), metadata=bearer(_TOKEN)
        )
        self.trainer = session_metadata(answer.session.token)
        join = JoinPool(
            name="node",
            contract=Contract(),
            capacity=1 << 16,
            policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=1 << 16),),
            codes=(RegisteredCode(name="single_turn"),),
        )
        answer = await RaasServiceStub(self.channel).JoinPool(
            wire.encode_join_pool(join), metadata=bearer(_TOKEN)
        )
        self.raas = session_metadata(answer.session.token)

    async def _publish(self) -> None:
        self.version += 1
        patch = PatchInfo(
            base_version=None,
            version=self.version,
            profile=CodecProfile.FAST,
            codec_version=1,
            root_digest=bytes(32),
            chunk_count=1,
            payload_nbytes=1,
        )
        info = VersionInfo(
            policy_id=POLICY,
            version=self.version,
            layout_digest=bytes(32),
            content_digest=self.version.to_bytes(16, "little"),
            step=self.step,
            patches=(patch,),
        )
        request = trainer_service_pb2.PublishVersionRequest(
            version=weights.encode_version_info(info)
        )
        await TrainerServiceStub(self.channel).PublishVersion(request, metadata=self.trainer)
        report = VersionReport(policy_id=POLICY, version=self.version, state=VersionState.LIVE)
        await VersionServiceStub(self.channel).ReportVersion(
            weights.encode_version_report(report), metadata=self.raas
        )

    async def _take_tasks(self) -> None:
        stream = RaasServiceStub(self.channel).StreamTasks(metadata=self.raas)
        request = raas_pb.StreamTasksRequest()
        request.open.credit.max_outstanding = 1 << 16
        await stream.write(request)
        made = _template(self.token_count)
        async for message in stream:
            if message.HasField("task"):
                for item in self._answers(message.task, made):
                    self.items.put_nowait(item)

    def _answers(self, task: Any, made: rollout_pb2.Rollout) -> list[raas_pb.RolloutItem]:
        items: list[raas_pb.RolloutItem] = []
        for index in task.sample_indexes:
            item = raas_pb.RolloutItem(rollout=made)
            item.rollout.rollout_id = item.rollout.trajectories[0].trajectory_id = (
                f"{task.task_id}/{index}"
            )
            item.rollout.task_id, item.rollout.group_id = task.task_id, task.group_id
            item.rollout.sample_index, item.rollout.reward = index, float(index % 2)
            item.rollout.trajectories[0].version_spans[0].version = self.version
            items.append(item)
        closing = raas_pb.RolloutItem()
        closing.result.task_id, closing.result.rollout_count = task.task_id, len(items)
        return [*items, closing]

    async def _send(self) -> None:
        stream = RaasServiceStub(self.channel).StreamRollouts(metadata=self.raas)
        sent = deque[float]()

        async def read() -> None:
            async for message in stream:
                now = time.perf_counter()
                self.acks.append((now - sent.popleft(), now))
                self.accepted += sum("/" in ack.item_id for ack in message.acks)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            due = time.perf_counter()
            while True:
                request = raas_pb.StreamRolloutsRequest(items=[await self.items.get()])
                # What was late is not made up for: a burst would measure itself.
                due = max(due, time.perf_counter() - 0.05)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                while len(request.items) < _ITEM_COUNT and not self.items.empty():
                    request.items.append(self.items.get_nowait())
                due += len(request.items) / self.rate if self.rate else 0.0
                sent.append(time.perf_counter())
                await stream.write(request)

    async def _train(self) -> None:
        stub = TrainerServiceStub(self.channel)
        request = trainer_service_pb2.StreamBatchesRequest(world_size=1, max_outstanding=2)
        header: Any = None
        left = 0
        async for message in stub.StreamBatches(request, metadata=self.trainer):
            if message.HasField("header"):
                header, left = message.header, message.header.part_count
            elif message.HasField("part"):
                left -= 1
            if header is not None and not left:
                self.step += 1
                await self._publish()
                ack = trainer_service_pb2.AckBatchRequest(
                    batch_id=header.batch_id,
                    outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED,
                    step=self.step,
                )
                await stub.AckBatch(ack, metadata=self.trainer)
                self.trained += header.row_count
                header = None

    async def _keep_alive(self) -> None:
        stub = SessionServiceStub(self.channel)
        while True:
            for member in (self.raas, self.trainer):
                await stub.KeepAlive(session_service_pb2.KeepAliveRequest(), metadata=member)
            await asyncio.sleep(2)


def _template(token_count: int) -> rollout_pb2.Rollout:
    mask = np.ones(token_count, bool)
    mask[:100] = False
    tokens = np.random.default_rng(0).integers(0, 150_000, token_count, np.int32)
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id="x",
        policy_id=POLICY,
        tokens=encode_tensor(tokens),
        sampled_mask=encode_tensor(mask),
        logprobs=encode_tensor(np.where(mask, -0.5, 0).astype(np.float32)),
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
    )
    trajectory.version_spans.add(length=int(mask.sum()), kv=trajectory_pb2.KV_POLICY_UNSPECIFIED)
    trajectory.sampling.temperature = trajectory.sampling.top_p = 1.0
    trajectory.sampling.repetition_penalty = 1.0
    return rollout_pb2.Rollout(
        rollout_id="x", outcome=rollout_pb2.OUTCOME_SCORED, trajectories=[trajectory]
    )


def make_recipe(folder: Path, mode: str) -> Path:
    """Write the recipe of a hub with a journal of some mode; return its path."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(1000)))
    trainer = {"groups_per_batch": GROUPS_PER_BATCH, "max_staleness": MAX_STALENESS}
    recipe = {
        "name": "hub",
        "policies": {POLICY: {"model": {"path": "unused"}, "trainer": trainer}},
        "data": {"train": {"path": str(data)}},
        "workflows": {"main": {"name": "single_turn"}},
        "rollouts": {"data_set": "train", "workflow": "main", "group_size": GROUP_SIZE},
        "hub": {"session_ttl_s": 60, "journal": MODES[mode]},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def start_hub(folder: Path, mode: str) -> tuple[subprocess.Popen[bytes], RunDir]:
    """Start a hub on the first core; return it once it serves."""
    run_dir = RunDir(folder / "run")
    command = ["dataflow", "serve", str(make_recipe(folder, mode)), "--run-dir", str(run_dir.root)]
    tokens = {"ASTRAFLOW_JOIN_TOKEN": _TOKEN, "ASTRAFLOW_OPERATOR_TOKEN": _TOKEN}
    hub = subprocess.Popen(
        [sys.executable, "-m", "astraflow", *command],
        env={**os.environ, **tokens},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "hub.log").open("wb"),
    )
    psutil.Process(hub.pid).cpu_affinity([0])
    while not run_dir.endpoint.exists():
        if hub.poll() is not None:
            sys.exit((folder / "hub.log").read_text())
        time.sleep(0.05)
    return hub, run_dir


async def measure(mode: str, *, seconds: float, load: Callable[[aio.Channel], Load]) -> Row:
    """Return what a hub does under load with one kind of journal."""
    with tempfile.TemporaryDirectory() as folder:
        hub, run_dir = start_hub(Path(folder), mode)
        try:
            return await _measure(hub, run_dir, seconds=seconds, make=load)
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                hub.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    hub.wait(3)


async def _measure(
    hub: subprocess.Popen[bytes],
    run_dir: RunDir,
    *,
    seconds: float,
    make: Callable[[aio.Channel], Load],
) -> Row:
    process = psutil.Process(hub.pid)
    async with dial(run_dir.read_endpoint().address) as channel:
        load = make(channel)
        driving = asyncio.create_task(load.run())
        await asyncio.wait([driving], timeout=_WARM_UP_S)
        before = _look(process, load)
        await asyncio.wait([driving], timeout=seconds)
        if driving.done():
            await driving
        after = _look(process, load)
        driving.cancel()
        with suppress(asyncio.CancelledError, AstraflowError, BaseExceptionGroup):
            await driving
    took = {name: after[name] - before[name] for name in after}
    wall_s = took["time"]
    spans = sorted(span for span, moment in load.acks if moment >= before["time"])
    return {
        "in_per_s": took["accepted"] / wall_s,
        "out_per_s": took["trained"] / wall_s,
        "ack_p50_ms": 1e3 * spans[len(spans) // 2],
        "ack_p99_ms": 1e3 * spans[int(len(spans) * 0.99)],
        "hub_cpu_fraction": took["cpu_s"] / wall_s,
        "hub_cpu_us_per_rollout": 1e6 * took["cpu_s"] / max(1, took["accepted"]),
        "disk_mb_per_s": took["written"] / wall_s / 1e6,
    }


def _look(process: psutil.Process, load: Load) -> dict[str, float]:
    cpu = process.cpu_times()
    return {
        "time": time.perf_counter(),
        "accepted": load.accepted,
        "trained": load.trained,
        "cpu_s": cpu.user + cpu.system,
        "written": process.io_counters().write_bytes,
    }


def main() -> None:
    """Print a line per mode, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.0, help="rollouts per second; 0: no limit")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    psutil.Process().cpu_affinity([1 % (os.cpu_count() or 1)])
    rows = asyncio.run(_measure_all(options))
    if options.json:
        report = {
            "bars": BARS,
            "load_average": os.getloadavg(),
            "rate": options.rate,
            "modes": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


async def _measure_all(options: argparse.Namespace) -> dict[str, Row]:
    """Measure in one event loop: gRPC keeps to the first one that it sees."""
    rows: dict[str, Row] = {}
    for mode in options.modes:
        rows[mode] = await measure(
            mode,
            seconds=options.seconds,
            load=lambda channel: Load(channel, options.tokens, options.rate * 9 / GROUP_SIZE),
        )
        print(mode, {name: round(value, 1) for name, value in rows[mode].items()}, flush=True)
    return rows


if __name__ == "__main__":
    main()
