"""How long a hub that was killed takes until it serves again, after many rollouts.

A hub with its journal and its compaction runs in a process of its own. A node and a trainer in that
process hand it events without a wire, as fast as a hub takes them over one (benchmarks/hub.py), so
that a million small rollouts take minutes; then it kills itself. `astraflow dataflow serve` goes on
in the same folder while a program without end keeps each core busy, and a client asks for the run's
status until it is answered.

    python benchmarks/restart.py --rollouts 1000000 --json restart.json
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
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from astraflow.client.control import ControlClient
from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.batches import AckBatch, BatchOutcome, StreamBatches
from astraflow.core.effects import SendBatch
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import (
    MemberKeptAlive,
    RolloutArrived,
    TaskFinished,
    VersionPublished,
    VersionReported,
)
from astraflow.core.members import Contract, JoinPool, RegisterTrainer, ServedPolicy
from astraflow.core.rollouts import Rollout, TaskResult, VersionSpan
from astraflow.core.tasks import RegisteredCode, RolloutTask, TaskCredit
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import Grant, HubTokens
from astraflow.wire.rollout import encode_rollout
from made_up import made_up_rollout, made_up_trajectory, made_up_version

BAR_S: Final = 5.0
POLICY: Final = "solver"
TOKENS: Final = HubTokens(join="benchmark", operator="benchmark")
_CREDIT: Final = 512


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4000.0, help="rollouts/s; 0: no limit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fill", type=Path, help="folder of a run to fill; used by itself")
    arguments = parser.parse_args()
    if arguments.fill:
        asyncio.run(_fill(arguments.fill, arguments.rollouts, arguments.rate))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = _measure(Path(folder), arguments.rollouts, arguments.restarts, arguments.rate)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _measure(folder: Path, rollouts: int, restarts: int, rate: float) -> dict[str, Any]:
    run_dir = RunDir(folder / "run")
    recipe = _write_recipe(folder)
    started = time.monotonic()
    command = [sys.executable, __file__, "--fill", str(folder)]
    command += ["--rollouts", str(rollouts), "--rate", str(rate)]
    filled = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if filled.returncode != -signal.SIGKILL:
        sys.exit(f"the hub ended with {filled.returncode}")
    fill_s = time.monotonic() - started
    with _busy_cores():
        rows = [_restart(run_dir, recipe) for _ in range(restarts)]
    return {
        "rollouts": json.loads(filled.stdout.splitlines()[-1])["accepted"],
        "fill_s": round(fill_s, 1),
        "journal_nbytes": sum(each.stat().st_size for each in run_dir.journal.parent.iterdir()),
        "busy_cores": os.cpu_count(),
        "restarts": rows,
        "serving_s": max(row["serving_s"] for row in rows),
        "bar_s": BAR_S,
    }


def _restart(run_dir: RunDir, recipe: Path) -> dict[str, Any]:
    """Serve the run again, kill it, and say how long it took to its first answers."""
    command = ["dataflow", "serve", str(recipe), "--run-dir", str(run_dir.root)]
    started = time.monotonic()
    hub = subprocess.Popen(
        [sys.executable, "-m", "astraflow", *command],
        env=os.environ
        | {"ASTRAFLOW_JOIN_TOKEN": TOKENS.join, "ASTRAFLOW_OPERATOR_TOKEN": TOKENS.operator},
        stdout=subprocess.DEVNULL,
        stderr=(run_dir.root / "hub.log").open("ab"),
    )
    try:
        row = asyncio.run(_first_answers(run_dir, started))
        times = psutil.Process(hub.pid).cpu_times()
        return row | {"hub_cpu_s": round(times.user + times.system, 2)}
    finally:
        hub.kill()
        hub.wait()


async def _first_answers(run_dir: RunDir, started: float) -> dict[str, Any]:
    answering_s = None
    address = run_dir.read_endpoint().address
    while True:
        async with ControlClient(address, token=TOKENS.operator, patience_s=0.05) as control:
            try:
                await control.get_run()
            except AstraflowError as error:
                if error.reason is not Reason.NOT_READY:
                    raise
                if "recovered_percent" in error.metadata and answering_s is None:
                    answering_s = round(time.monotonic() - started, 2)
            else:
                serving_s = time.monotonic() - started
                return {"answering_s": answering_s, "serving_s": round(serving_s, 2)}
        await asyncio.sleep(0.1)


@contextmanager
def _busy_cores() -> Generator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def _write_recipe(folder: Path) -> Path:
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(1000)))
    recipe = {
        "name": "restart",
        "policies": {
            POLICY: {
                "model": {"path": "unused"},
                "trainer": {"groups_per_batch": 32, "max_staleness": 4, "step_count": 10**9},
            }
        },
        "data": {"train": {"path": str(data)}},
        "workflows": {"main": {"name": "single_turn"}},
        "rollouts": {"data_set": "train", "workflow": "main", "group_size": 8},
        "hub": {"listen": "127.0.0.1:0", "session_ttl_s": 600},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


async def _fill(folder: Path, count: int, rate: float) -> None:
    """Serve a hub, have it take so many rollouts, and die."""
    ready: asyncio.Future[tuple[Hub, str]] = asyncio.get_running_loop().create_future()
    run_dir = RunDir(folder / "run")
    recipe = load_recipe(folder / "recipe.yaml", ())
    serving = asyncio.ensure_future(
        serve_hub(
            recipe,
            run_dir=run_dir.root,
            tokens=TOKENS,
            on_ready=lambda hub, address: ready.set_result((hub, address)),
        )
    )
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    hub, address = await ready
    # As the process of a hub leaves it: who comes next takes the same port.
    run_dir.write_endpoint(
        HubEndpoint(address=address, pid=1, operator_token=TOKENS.operator, join_token=TOKENS.join)
    )
    members = _Members(hub)
    await members.join()
    started = time.monotonic()
    while members.accepted < count:
        await members.work()
        if rate:
            await asyncio.sleep(started + members.accepted / rate - time.monotonic())
    await hub.commits.passed()
    print(json.dumps({"accepted": members.accepted}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class _Members:
    """A node and a trainer in the hub's own process."""

    def __init__(self, hub: Hub) -> None:
        self.accepted = 0
        self._hub = hub
        self._version = 0
        self._renew_s = time.monotonic()

    async def join(self) -> None:
        hub = self._hub
        registration = await hub.register_trainer(
            RegisterTrainer(
                policy_id=POLICY,
                name="trainer",
                contract=Contract(software="benchmark"),
                groups_per_batch=32,
                weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
            ),
            Grant.parse("trainer"),
        )
        self._trainer = registration.session.member_id
        await self._publish(0)
        stream = StreamBatches(
            member_id=self._trainer, rank=0, world_size=1, max_outstanding=2, max_tokens=0
        )
        self._batches = await hub.open_batches(stream)
        membership = await hub.join_pool(
            JoinPool(
                name="node",
                contract=Contract(software="benchmark"),
                capacity=_CREDIT,
                policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=64),),
                codes=(RegisteredCode(name="single_turn"),),
            ),
            Grant.parse("node"),
        )
        self._node = membership.session.member_id
        self._tasks = hub.executor.outboxes.tasks(self._node)
        await hub.take(TaskCredit(member_id=self._node, max_outstanding=_CREDIT))
        await self._live(0)

    async def work(self) -> None:
        """Answer what is asked, train on what is there."""
        for item in await _there(self._tasks):
            if isinstance(item, RolloutTask):
                self._answer(item)
        await self._hub.commits.passed()
        for item in await _there(self._batches):
            if isinstance(item, SendBatch):
                await self._train(item)
        if time.monotonic() > self._renew_s + 10:
            self._renew_s = time.monotonic()
            for member_id in (self._node, self._trainer):
                await self._hub.take(MemberKeptAlive(member_id=member_id))

    def _answer(self, task: RolloutTask) -> None:
        samples = [self._sample(task, index) for index in task.sample_indexes]
        for each in samples:
            event = RolloutArrived(member_id=self._node, rollout=each)
            self._hub.apply(event, received=encode_rollout(each).SerializeToString(), goes_on=True)
        result = TaskResult(task_id=task.task_id, rollout_count=len(samples))
        self._hub.apply(TaskFinished(member_id=self._node, result=result))
        self.accepted += len(samples)

    def _sample(self, task: RolloutTask, index: int) -> Rollout:
        name = f"{task.task_id}/{index}"
        spans = [VersionSpan(version=self._version, length=3)]
        return made_up_rollout(
            made_up_trajectory(name, POLICY, spans),
            rollout_id=name,
            task_id=task.task_id,
            group_id=task.group_id,
            sample_index=index,
            reward=float(index % 2),
        )

    async def _train(self, batch: SendBatch) -> None:
        await self._publish(self._version + 1)
        await self._live(self._version + 1)
        self._version += 1
        await self._hub.take(
            AckBatch(
                member_id=self._trainer,
                batch_id=batch.header.batch_id,
                outcome=BatchOutcome.CONSUMED,
                step=self._version,
            )
        )

    async def _publish(self, version: int) -> None:
        info = made_up_version(POLICY, version, step=version)
        await self._hub.take(VersionPublished(member_id=self._trainer, info=info))

    async def _live(self, version: int) -> None:
        report = VersionReport(policy_id=POLICY, version=version, state=VersionState.LIVE)
        await self._hub.take(VersionReported(member_id=self._node, report=report))


async def _there(outbox: Any) -> list[Any]:
    """Return what is there now; nothing may be."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            return await outbox.take()
    return []


if __name__ == "__main__":
    main()
