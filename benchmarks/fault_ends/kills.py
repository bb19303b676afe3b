"""kill -9 of a source while it sends."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from random import Random
from time import sleep
from typing import Any, Final

from astraflow.codec.chunks import Chunk
from astraflow.core.tensors import Layout
from astraflow.core.versions import PatchInfo
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.lanes import Lanes
from astraflow.weights.fetch.lanes import ChunkLane
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk
from fault_ends.processes import process
from fault_ends.trial import Counts, Receiver, count
from fault_ends.world import POLICY, TOKEN, World, sources

SCALE: Final = 4
CHUNK_S: Final = 0.003


def kill_sources(*, quota: int, seed: int) -> dict[str, Counts]:
    """Kill so many sources; return the counts."""
    counts = Counts()
    rng = Random(seed)
    for number in range(quota):
        asyncio.run(_kill_source(counts, rng, seed + number))
    return {"killed_source": counts}


class SlowStore:
    """A store that takes a while for every chunk, so that there is something to break into."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return a chunk, slowly."""
        sleep(CHUNK_S)
        return self._store.chunk(info, index)


class SlowPublisher:
    """What a WeightServer serves."""

    def __init__(self, world: World) -> None:
        self.policy_id = POLICY
        self.store = SlowStore(world.publisher.store)


class TellingLane:
    """A lane that tells of each item before it is passed on."""

    def __init__(self, lane: ChunkLane, tell: Callable[[], None], *, pause_s: float = 0.0) -> None:
        """Wrap a lane.

        Args:
            lane: Over which items come.
            tell: Called for each.
            pause_s: Between two of them, as on a slow line.
        """
        self._lane = lane
        self._tell = tell
        self._pause_s = pause_s

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan, then its chunks."""
        async for item in self._lane.pull(endpoint, spec, transfer_token):
            await asyncio.sleep(self._pause_s)
            self._tell()
            yield item

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout."""
        return await self._lane.get_layout(endpoint, digest, transfer_token)

    async def close(self) -> None:
        """Close all connections."""
        await self._lane.close()


class Countdown:
    """Does something when it was called so many times; 0: never.

    Attributes:
        left: Calls to come.
    """

    def __init__(self, then: Callable[[], None], left: int = 0) -> None:
        self.left = left
        self._then = then

    def __call__(self) -> None:
        """Count."""
        self.left -= 1
        if self.left == 0:
            self._then()


# A source that is killed.


def serve_until_killed(end: Connection, seed: int) -> None:
    """Be a source of a training: publish on request, tell the endpoint."""
    world = World(seed=seed, scale=SCALE)
    with WeightServer(SlowPublisher(world)) as server:  # type: ignore[arg-type]
        server.set_transfer_token(TOKEN)
        world.publish()
        end.send(server.endpoint)
        with suppress(EOFError):
            while version := end.recv():
                world.publish()
                end.send(version)


async def _kill_source(counts: Counts, rng: Random, seed: int) -> None:
    """Kill a source after some items; an honest one stands behind it."""
    world = World(seed=seed, scale=SCALE)
    with process(serve_until_killed, seed) as (child, end), WeightServer(world.publisher) as honest:
        honest.set_transfer_token(TOKEN)
        endpoint = await asyncio.to_thread(end.recv)
        both = sources((endpoint, honest.endpoint))
        lane = GrpcLane() if rng.random() < 0.5 else Lanes()
        trigger = Countdown(child.kill)
        receiver = Receiver(world, TellingLane(lane, trigger))
        after = rng.randrange(1, 8)
        for _ in range(3):
            info = replace(world.publish(), sources=both)
            if info.version:
                end.send(info.version)
                await asyncio.to_thread(end.recv)
            trigger.left = after if info.version == 2 else 0
            outcome = await receiver.pull(info)
        child.join(timeout=5)
        kind = f"{type(lane).__name__}, item {after}"
        if child.exitcode != -signal.SIGKILL:
            outcome = replace(outcome, corruption="the source was not killed")
        count(counts, kind, outcome, endpoint)
        await receiver.puller.close()
