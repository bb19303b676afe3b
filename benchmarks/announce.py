"""A version to a pool of relays: the hub's CPU, from its publication until every node reported it.

The members are in the process of the hub and cost nothing: each watches the versions as over the
wire, down to the bytes of its message, and then reports that the version is live. A second of CPU
is one of the hub's thread. Three regions; every node is a relay; sixteen patches per version.

- `published`: the announcement of a new version to all watchers.
- `reported`: their reports, each with what its source gave.
- `again`: the same version once more to all, when all of them hold it.
- `joined`: one more node reads what can be pulled, 64 versions.

Bars: 100 ms for `published` at 1,000 nodes, and a node costs at most twice as much in a pool of
1,000 as in one of 100. What gRPC needs to send a message is not in it.

    python benchmarks/announce.py --json announce.json
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

from astraflow.config.run_dir import RunDir
from astraflow.core import events as ev
from astraflow.core.clock import SystemClock
from astraflow.core.ids import MemberId, PolicyId, RunId, WorkflowId
from astraflow.core.members import Contract, JoinPool, RegisterTrainer, ServedPolicy
from astraflow.core.run import Run
from astraflow.core.settings import PolicySettings, RolloutSettings, RunSettings
from astraflow.core.tasks import RegisteredCode, WorkflowSpec
from astraflow.core.versions import (
    SourceInfo,
    SourceKind,
    SourceReport,
    SourceState,
    VersionInfo,
    VersionReport,
    VersionState,
    WeightEndpoint,
)
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.prompts import DataSets
from astraflow.dataflow.recorder import RunRecorder
from astraflow.wire.versions import VersionEncoder
from astraflow_proto.weights.v1.version_service_pb2 import WatchVersionsResponse
from made_up import made_up_patch, made_up_version
from verdict import conclude

POLICY: Final = PolicyId("policy")
CODE: Final = RegisteredCode(name="none")
REGIONS: Final = ("east", "west", "south")
BAR_MS: Final = 100.0
MOST_GROWTH: Final = 2.0
WARM_VERSIONS: Final = 63


class Pool:
    """A hub with a trainer and watching nodes."""

    def __init__(self, folder: Path) -> None:
        clock = SystemClock()
        self.hub = Hub(
            Run(_settings(), start_time=clock.now()),
            data_sets=DataSets({}),
            sources={},
            recorder=RunRecorder(RunDir(folder)),
            clock=clock,
        )
        self.encoder = VersionEncoder()
        self.nodes: list[MemberId] = []
        self.seen_nbytes = 0
        self._seen = 0
        self._all_saw = asyncio.Event()
        request = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(),
            groups_per_batch=1,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="trainer:1"),),
        )
        secrets = ev.SessionSecrets(token=b"", transfer_token=b"")
        answer = self.hub.apply(ev.TrainerRegistered(request=request, secrets=secrets))
        self._trainer: MemberId = answer.session.member_id

    def join(self) -> MemberId:
        """Let one relay join."""
        number = len(self.nodes)
        request = JoinPool(
            name=f"node{number}",
            contract=Contract(),
            capacity=8,
            policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=1 << 15),),
            codes=(CODE,),
            region=REGIONS[number % len(REGIONS)],
            relay_endpoint=f"node{number}:1",
        )
        secrets = ev.SessionSecrets(token=b"%d" % number, transfer_token=b"")
        member_id = self.hub.apply(ev.RaasJoined(request=request, secrets=secrets))
        self.nodes.append(member_id.session.member_id)
        return self.nodes[-1]

    async def watch(self, member_id: MemberId, after: int) -> None:
        """Read versions as the servicer sends them, for ever."""
        async for info in self.hub.watch_versions(POLICY, after, member_id):
            message = WatchVersionsResponse(version=self.encoder.encode(info))
            self.seen_nbytes += len(message.SerializeToString())
            self._seen += 1
            if self._seen == len(self.nodes):
                self._all_saw.set()

    def publish(self, info: VersionInfo) -> None:
        """Let the trainer announce a version, or what it gained."""
        self.hub.apply(ev.VersionPublished(member_id=self._trainer, info=info))

    async def announce(self, info: VersionInfo) -> float:
        """Publish; return the seconds of CPU until every node has its message."""
        self._seen = 0
        self._all_saw.clear()
        began = time.thread_time()
        self.publish(info)
        await self._all_saw.wait()
        return time.thread_time() - began

    def report(self, version: int) -> float:
        """Let every node say that it serves a version; return the seconds of CPU."""
        given = SourceReport(
            address="trainer:1", nbytes=1 << 20, duration=timedelta(milliseconds=100)
        )
        report = VersionReport(
            policy_id=POLICY, version=version, state=VersionState.LIVE, reports=(given,)
        )
        began = time.thread_time()
        for member_id in self.nodes:
            self.hub.apply(ev.VersionReported(member_id=member_id, report=report))
        return time.thread_time() - began


@asynccontextmanager
async def watched_pool(node_count: int) -> AsyncGenerator[Pool]:
    """Yield a hub whose nodes hold the last of 64 versions and wait for the next one."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        for version in range(WARM_VERSIONS + 1):
            pool.publish(version_of(version))
        watches = [
            asyncio.create_task(pool.watch(pool.join(), WARM_VERSIONS)) for _ in range(node_count)
        ]
        pool.report(WARM_VERSIONS)
        await asyncio.sleep(0)
        yield pool
        for watch in watches:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch


def version_of(number: int) -> VersionInfo:
    """Return a version with patches from the sixteen versions before."""
    info = made_up_version(POLICY, number, step=number)
    bases = range(max(0, number - 16), number)
    patches = tuple(made_up_patch(number, base_version=base) for base in bases)
    return replace(info, patches=patches or info.patches)


async def measure(node_count: int, count: int) -> dict[str, Any]:
    """Return milliseconds of CPU for a pool of a size, medians of so many versions."""
    rows: list[tuple[float, float, float]] = []
    async with watched_pool(node_count) as pool:
        for number in range(WARM_VERSIONS + 1, WARM_VERSIONS + 1 + count):
            info = version_of(number)
            published_s = await pool.announce(info)
            reported_s = pool.report(number)
            store = SourceInfo(
                kind=SourceKind.OBJECT_STORE, state=SourceState.LIVE, uri="s3://weights"
            )
            again_s = await pool.announce(replace(info, sources=(store,)))
            rows.append((published_s, reported_s, again_s))
        joined_s = cpu_s_of(lambda: read_all(pool))
        message_nbytes = pool.seen_nbytes / (2 * count * node_count)
    published, reported, again = (median(column) * 1e3 for column in zip(*rows, strict=True))
    return {
        "nodes": node_count,
        "published_ms": published,
        "reported_ms": reported,
        "again_ms": again,
        "joined_ms": joined_s * 1e3,
        "message_nbytes": message_nbytes,
    }


def read_all(pool: Pool) -> None:
    """Read what a node reads that joins with nothing."""
    for info in pool.hub.run.versions(POLICY, pool.join()):
        pool.encoder.encode(info)


def cpu_s_of(act: Callable[[], None]) -> float:
    """Return the seconds of CPU that something takes."""
    began = time.thread_time()
    act()
    return time.thread_time() - began


def _settings() -> RunSettings:
    workflow = WorkflowSpec(workflow_id=WorkflowId("none"), code=CODE, policy_ids=(POLICY,))
    return RunSettings(
        run_id=RunId("announce"),
        policies=(PolicySettings(policy_id=POLICY, groups_per_batch=1, max_staleness=1),),
        workflows=(workflow,),
        rollouts=RolloutSettings(workflow_id=workflow.workflow_id, group_size=1),
    )


def main() -> None:
    """Print a line per size of the pool, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for node_count in options.nodes:
        rows.append(asyncio.run(measure(node_count, options.versions)))
        print(json.dumps({key: round(value, 2) for key, value in rows[-1].items()}), flush=True)
    least, most = rows[0], rows[-1]
    growth = (most["published_ms"] / most["nodes"]) / (least["published_ms"] / least["nodes"])
    holds = growth <= MOST_GROWTH and most["published_ms"] <= BAR_MS
    found = {"rows": rows, "growth_per_node": growth, "bar_ms": BAR_MS, "holds": holds}
    print(json.dumps({"growth_per_node": round(growth, 2), "holds": holds}))
    conclude(found, options.json)


if __name__ == "__main__":
    main()
