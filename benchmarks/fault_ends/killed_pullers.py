"""kill -9 of a puller, as it pulls, applies or writes to disk; another one takes its place."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from time import sleep
from typing import Any, Final

import numpy as np

from astraflow.codec.chunks import Chunk
from astraflow.core.tensors import Layout, WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.transport.lanes import Lanes
from astraflow.weights.disk import copy, files
from astraflow.weights.disk.copy import MAX_STEPS, DiskCopy, Snapshots
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.serve.server import WeightServer
from fault_ends.kills import SCALE, Countdown, SlowPublisher, TellingLane
from fault_ends.processes import process
from fault_ends.trial import Counts, Outcome, count
from fault_ends.world import POLICY, TOKEN, World, make_layout, sources

_POINTS: Final = ("transfer", "any_time", "apply", "write", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process.

    Attributes:
        infos: Versions to be pulled, one after the other.
        folder: With the live weights, and the copy on disk.
        point: Where it dies, in the last version; empty: it does not, and pulls that one alone.
        seed: Decides when.
    """

    infos: tuple[VersionInfo, ...]
    folder: Path
    point: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the one that lives says at its end.

    Attributes:
        base_version: That the last version was reached from; None: all of it was pulled.
        nbytes: Payload pulled.
    """

    base_version: int | None
    nbytes: int


def kill_pullers(*, quota: int, seed: int) -> dict[str, Counts]:
    """Kill so many pullers that follow, and as many that join; return the counts."""
    counts = {"killed_puller": Counts(), "killed_join": Counts()}
    rng = Random(seed)
    for number in range(quota):
        _kill_follower(counts["killed_puller"], rng, seed + number)
        _kill_joiner(counts["killed_join"], rng, seed + number)
    return counts


# In the child.


def live_and_die(end: Connection, life: Life) -> None:
    """Pull version after version into live weights in a file."""
    asyncio.run(_live_and_die(end, life, Random(life.seed)))


async def _live_and_die(end: Connection, life: Life, rng: Random) -> None:
    item, tensor, write = Countdown(_die), Countdown(_die), Countdown(_die)
    _die_in_writes(write, rng)
    layout = make_layout(SCALE)
    live = np.memmap(life.folder / "live", np.uint8, "r+", shape=(layout.nbytes,))
    # In a life that ends there, every version is followed by the state.
    max_steps = 0 if life.point == "state" else MAX_STEPS
    copy = DiskCopy.open(life.folder / "cache", max_steps=max_steps)
    pause_s = 0.004 if life.point == "join" else 0.0
    lane = TellingLane(Lanes(), item, pause_s=pause_s)
    puller = WeightPuller(POLICY, lane=lane, copy=copy)
    known = {each.version: each for each in life.infos}
    for info in life.infos if life.point else life.infos[-1:]:
        if info is life.infos[-1] and life.point:
            await puller.flush()
            item.left = rng.randrange(1, 8) * (life.point in ("transfer", "join"))
            tensor.left = rng.randrange(1, 5) * (life.point == "apply")
            write.left = rng.randrange(1, 26) * (life.point in ("write", "state"))
            end.send("begins")
        pulled = await puller.pull(info, known, TOKEN)
        # Whoever takes the place of another has an engine without weights.
        _apply(pulled.update if life.point else puller.full_update(), layout, live, tensor)
    await puller.flush()
    live.flush()
    if not life.point:
        end.send(Told(base_version=pulled.update.base_version, nbytes=pulled.nbytes))
    elif life.point == "any_time":
        await asyncio.sleep(5)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_writes(write: Countdown, rng: Random) -> None:
    """Count what is written to the copy: chunks, halves of them too, records, and states."""
    append, put = files.PatchWriter.append, copy.replace_file
    blocks = Snapshots.blocks
    of_file: Any = files.PatchWriter

    def torn(self: Any, chunk: Chunk) -> None:
        if write.left == 1:
            self._file.write(bytes(chunk.payload)[: rng.randrange(len(chunk.payload) + 1)])
            self._file.flush()
        write()
        append(self, chunk)
        write()

    def put_or_die(path: Path, content: bytes) -> None:
        write()
        put(path, content)
        write()

    def counted(self: Snapshots) -> Generator[np.ndarray]:
        for block in blocks(self):
            yield block
            write()

    Snapshots.blocks = counted  # type: ignore[method-assign]
    of_file.append = torn
    copy.replace_file = put_or_die


def _apply(update: WeightUpdate, layout: Layout, live: np.ndarray, tell: Countdown) -> None:
    for each in update.tensors:
        bits = layout.view(live, each.spec.name).reshape(-1)
        bits[slice(None) if each.indices is None else each.indices] = each.values
        tell()


# In the parent.


def _kill_follower(counts: Counts, rng: Random, seed: int) -> None:
    """Kill a puller in its third version."""
    point = _POINTS[seed % len(_POINTS)]
    told, corruption, _ = _lives(rng, seed, point=point, version_count=3)
    # What lay on disk already is what was reached, without a byte.
    base_version = told.base_version if told.nbytes else 2
    _count(counts, point, corruption, 2, base_version)


def _kill_joiner(counts: Counts, rng: Random, seed: int) -> None:
    """Kill a puller in its first version; what it had should not be pulled again."""
    told, corruption, whole_nbytes = _lives(rng, seed, point="join", version_count=1)
    went_on = told.nbytes < whole_nbytes
    kind = "went on" if went_on else "nothing lay on disk yet"
    _count(counts, kind, corruption, 0, 0 if went_on else None)


def _lives(rng: Random, seed: int, *, point: str, version_count: int) -> tuple[Told, str, int]:
    """Kill a puller, start another one in its place, and look at the weights that are live.

    Returns:
        What the second one says, how what is live is wrong (empty: it is not), and the bytes of
        the first version.
    """
    world = World(seed=seed, scale=SCALE)
    with (
        tempfile.TemporaryDirectory() as name,
        WeightServer(SlowPublisher(world)) as server,  # type: ignore[arg-type]
    ):
        server.set_transfer_token(TOKEN)
        folder, last = Path(name), version_count - 1
        (folder / "live").write_bytes(bytes(world.layout.nbytes))
        at = sources((server.endpoint,))
        infos = tuple(replace(world.publish(), sources=at) for _ in range(version_count))
        life = Life(infos=infos, folder=folder, point=point, seed=seed)
        with process(live_and_die, life) as (child, end):
            end.recv()
            if point == "any_time":
                sleep(rng.random() * 0.06)
                child.kill()
            child.join(timeout=30)
            was_killed = child.exitcode == -signal.SIGKILL
        with process(live_and_die, replace(life, point="")) as (child, end):
            told = end.recv()
            child.join(timeout=30)
        is_true = (folder / "live").read_bytes() == world.truths[last].tobytes()
        corruption = "" if is_true else f"live is not version {last}"
        fault = corruption if was_killed else "the puller was not killed"
        return told, fault, infos[0].patches[0].payload_nbytes


def _count(
    counts: Counts, kind: str, corruption: str, version: int, base_version: int | None
) -> None:
    update = WeightUpdate(policy_id=POLICY, version=version, base_version=base_version, tensors=())
    outcome = Outcome(update=update, nbytes=0, error=None, faults={}, corruption=corruption)
    count(counts, kind, outcome, "")
