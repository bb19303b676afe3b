"""A node without rollouts: a real member, its updater and its engine, and somebody who samples.

    python -m live_ends.node HUB FOLDER STREAMS DTYPE THREADS

Tells of every version when it was heard of, pulled and swapped in, and when the first token was
sampled with it: by a request that waited for it where nothing is decoded, else by the next
decode step of what is.
"""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from astraflow.client.raas import VersionClient, dial_pool
from astraflow.client.session import MemberHooks
from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, JoinPool, RaasLoad, Resources, ServedPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.raas.policies import VersionGate
from astraflow.raas.updater import WeightUpdater
from astraflow.rpc.concurrency import beside
from astraflow.telemetry.logging import configure_logging
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.workflows.building import workflow_specs
from live_ends.run import POLICY, TOKEN, recipe_of, say

PROMPT: Final = [3, 4, 5, 6, 7, 8, 9, 10]
STREAM_LENGTH: Final = 256

Times = defaultdict[int, dict[str, Any]]


class TimedVersions:
    """Notes when a version was heard of."""

    def __init__(self, versions: VersionClient, times: Times) -> None:
        self._versions = versions
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._versions, name)

    async def watch(self, policy_id: PolicyId, **options: Any) -> AsyncIterator[VersionInfo]:
        """Yield versions."""
        async for info in self._versions.watch(policy_id, **options):
            self._times[info.version].setdefault("heard", time.monotonic())
            yield info


class TimedPuller:
    """Notes when a version was pulled."""

    def __init__(self, puller: WeightPuller, times: Times) -> None:
        self._puller = puller
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._puller, name)

    async def pull(self, target: VersionInfo, *rest: Any, **more: Any) -> Any:
        """Pull."""
        asked = time.monotonic()
        pulled = await self._puller.pull(target, *rest, **more)
        self._times[target.version].update(
            arrived=asked + pulled.duration.total_seconds(),
            decoded=time.monotonic(),
            pulled_nbytes=pulled.nbytes,
        )
        return pulled


class TimedEngine:
    """Notes when a version was live and when its first token was there."""

    def __init__(self, engine: EmbeddedEngine, times: Times) -> None:
        self._engine = engine
        self._times = times
        self._streams: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Swap, and wait for a token."""
        report = await self._engine.swap(update)
        self._times[update.version].update(swapped=time.monotonic(), pause_s=report.pause_s)
        await self._first_token()
        self._times[update.version]["token"] = time.monotonic()
        say(version=update.version, **self._times.pop(update.version))
        return report

    def stream(self, count: int) -> None:
        """Decode so many sequences from now on."""
        self._streams = [asyncio.create_task(self._stream()) for _ in range(count)]

    async def close(self) -> None:
        """Stop the streams and the engine."""
        for each in self._streams:
            each.cancel()
        await self._engine.close()

    async def _first_token(self) -> None:
        if not self._streams:
            await self._engine.generate(PROMPT, SamplingParams(max_new_tokens=1, ignore_eos=True))
            return
        before = self._engine.load().sampled_token_count
        while self._engine.load().sampled_token_count == before:  # noqa: ASYNC110 - it tells no one
            await asyncio.sleep(0.001)

    async def _stream(self) -> None:
        sampling = SamplingParams(max_new_tokens=STREAM_LENGTH, ignore_eos=True)
        while True:
            await self._engine.generate(PROMPT, sampling)


def _join(folder: Path, engine: EmbeddedEngine) -> JoinPool:
    served = ServedPolicy(
        policy_id=POLICY, version=None, max_context_token_count=engine.max_context_token_count
    )
    return JoinPool(
        name="far",
        contract=Contract(),
        capacity=1,
        policies=(served,),
        codes=tuple(spec.code for spec in workflow_specs(recipe_of(folder))),
        resources=Resources(),
        region="far",
    )


async def main(hub: str, folder: Path, streams: int, settings: Mapping[str, Any]) -> None:
    """Follow the versions until stdin ends."""
    times: Times = defaultdict(dict)
    engine = EmbeddedEngine.from_directory(folder, EngineSettings(**settings), POLICY)
    timed: Any = TimedEngine(engine, times)
    join = _join(folder, engine)
    async with dial_pool(hub, token=TOKEN, join=join, hooks=MemberHooks(load=RaasLoad)) as client:
        await client.join()
        versions: Any = TimedVersions(client.versions, times)
        puller: Any = TimedPuller(WeightPuller(POLICY), times)
        updater = WeightUpdater(
            POLICY,
            engine=timed,
            gate=VersionGate(POLICY, timed),
            puller=puller,
            versions=versions,
            transfer_token=lambda: client.session.transfer_token,
        )
        async with beside(client.session.run(), updater.run()):
            await asyncio.to_thread(sys.stdin.readline)
            timed.stream(streams)
            await asyncio.to_thread(sys.stdin.read)
            await timed.close()
        await client.session.end("the benchmark is over")


if __name__ == "__main__":
    configure_logging("node", level="warning")
    _hub, _folder, _streams, _dtype, _threads = sys.argv[1:]
    asyncio.run(
        main(
            _hub,
            Path(_folder),
            int(_streams),
            {
                "max_batch": 8,
                "max_context": 512,
                "device": "cpu",
                "dtype": _dtype,
                "thread_count": int(_threads),
            },
        )
    )
