"""kill -9: of a source while it sends, and of a puller while it pulls or applies."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from time import sleep
from typing import Any, Final

import numpy as np

from astraflow.codec.chunks import Chunk
from astraflow.core.layout import Layout
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.lanes import Lanes
from astraflow.weights.fetch import Lane
from astraflow.weights.puller import WeightPuller
from astraflow.weights.server import WeightServer
from astraflow.wire.patches import SentChunk, TransferPlan, TransferSpec
from fault_ends.processes import process
from fault_ends.trial import Counts, Outcome, Receiver, count
from fault_ends.world import POLICY, TOKEN, World, make_layout, sources

_SCALE: Final = 4
_CHUNK_S: Final = 0.003
_POINTS: Final = ("transfer", "any_time", "apply")


def kill_ends(*, quota: int, seed: int) -> dict[str, Counts]:
    """Kill so many sources and so many pullers; return the counts."""
    counts = {"killed_source": Counts(), "killed_puller": Counts()}
    rng = Random(seed)
    for number in range(quota):
        asyncio.run(_kill_source(counts["killed_source"], rng, seed + number))
        _kill_puller(counts["killed_puller"], rng, seed + number)
    return counts


class SlowStore:
    """A store that takes a while for every chunk, so that there is something to break into."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return a chunk, slowly."""
        sleep(_CHUNK_S)
        return self._store.chunk(info, index)


class SlowPublisher:
    """What a WeightServer serves."""

    def __init__(self, world: World) -> None:
        self.policy_id = POLICY
        self.store = SlowStore(world.publisher.store)


class TellingLane:
    """A lane that tells of each item before it is passed on."""

    def __init__(self, lane: Lane, tell: Callable[[], None]) -> None:
        self._lane = lane
        self._tell = tell

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan, then its chunks."""
        async for item in self._lane.pull(endpoint, spec, transfer_token):
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
    world = World(seed=seed, scale=_SCALE)
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
    world = World(seed=seed, scale=_SCALE)
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


# A puller that is killed.


def pull_and_die(
    end: Connection, infos: list[VersionInfo], path: str, point: str, seed: int
) -> None:
    """Pull version after version into live weights in a file; die in the last one at a point.

    Where the point is "never", the last version is all that is pulled.
    """
    asyncio.run(_pull_and_die(end, infos, path, point, Random(seed)))


async def _pull_and_die(
    end: Connection, infos: list[VersionInfo], path: str, point: str, rng: Random
) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    item, tensor = Countdown(die), Countdown(die)
    layout = make_layout(_SCALE)
    live = np.memmap(path, np.uint8, "r+", shape=(layout.nbytes,))
    puller = WeightPuller(POLICY, lane=TellingLane(Lanes(), item))
    known = {each.version: each for each in infos}
    for info in infos[-1:] if point == "never" else infos:
        if info is infos[-1]:
            item.left = rng.randrange(1, 8) * (point == "transfer")
            tensor.left = rng.randrange(1, 5) * (point == "apply")
            end.send("begins")
        pulled = await puller.pull(info, known, TOKEN)
        _apply(pulled.update, layout, live, tensor)
    live.flush()
    end.send(("base", pulled.update.base_version))
    if point == "any_time":
        await asyncio.sleep(5)


def _apply(update: WeightUpdate, layout: Layout, live: np.ndarray, tell: Countdown) -> None:
    for each in update.tensors:
        bits = layout.view(live, each.spec.name).reshape(-1)
        bits[slice(None) if each.indices is None else each.indices] = each.values
        tell()


def _kill_puller(counts: Counts, rng: Random, seed: int) -> None:
    """Kill a puller, start another one in its place, and look at the weights that are live."""
    world = World(seed=seed, scale=_SCALE)
    point = _POINTS[seed % len(_POINTS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        WeightServer(SlowPublisher(world)) as server,  # type: ignore[arg-type]
    ):
        server.set_transfer_token(TOKEN)
        path = Path(folder) / "live"
        path.write_bytes(bytes(world.layout.nbytes))
        infos = [replace(world.publish(), sources=sources((server.endpoint,))) for _ in range(3)]
        with process(pull_and_die, infos, str(path), point, seed) as (child, end):
            end.recv()
            if point == "any_time":
                sleep(rng.random() * 0.06)
                child.kill()
            child.join(timeout=30)
            was_killed = child.exitcode == -signal.SIGKILL
        with process(pull_and_die, infos, str(path), "never", seed) as (_, end):
            end.recv()
            _, base_version = end.recv()
        is_true = path.read_bytes() == world.truths[2].tobytes()
        fault = "" if was_killed else "the puller was not killed"
        _count_puller(counts, point, fault if is_true else "live is not version 2", base_version)


def _count_puller(counts: Counts, point: str, corruption: str, base_version: int | None) -> None:
    """Count; nothing of a puller outlives it, so whoever takes its place pulls a full copy."""
    update = WeightUpdate(policy_id=POLICY, version=2, base_version=base_version, tensors=())
    outcome = Outcome(update=update, nbytes=0, error=None, faults={}, corruption=corruption)
    count(counts, point, outcome, "")
