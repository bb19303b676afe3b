"""Full disks: object stores that find no room for a version, and nodes that find none for theirs.

The disk is a small tmpfs where this process may mount one; otherwise files may not grow beyond a
limit (RLIMIT_FSIZE), which a writer meets in the same place, as another error of the same kind.
"""

import os
import resource
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final, Protocol

from astraflow.core.versions import SourceKind, VersionInfo
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.serve.server import WeightServer
from fault_ends.trial import Counts, Outcome, Receiver, count
from fault_ends.world import POLICY, TOKEN, World, sources

_SCALE: Final = 32
_DISK_NBYTES: Final = 4 << 20
_PAGE: Final = 4096
_TRIES: Final = 5


async def fill_disks(*, quota: int, seed: int) -> dict[str, Counts]:
    """Fill so many disks of object stores, and of nodes; return the counts."""
    counts = {"full_store_disk": Counts(), "full_node_disk": Counts()}
    rng = Random(seed)
    for fill, each in zip((_fill_store, _fill_node), counts.values(), strict=True):
        # A disk that happens to have room enough is none of them.
        for number in range(_TRIES * quota):
            if each.injected < quota:
                await fill(each, rng, seed + number)
    return counts


class Disk(Protocol):
    """Somewhere to write to, with a little room or all of it.

    Attributes:
        kind: How it is made full.
        folder: To write to.
    """

    kind: str
    folder: Path

    def fill(self, left_nbytes: int) -> None:
        """Leave so much room."""
        ...

    def free(self) -> None:
        """Give all room back."""
        ...


class SmallDisk:
    """A tmpfs; a file takes what room there is."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.folder.mkdir()
        self._ballast = folder / "ballast"

    def fill(self, left_nbytes: int) -> None:
        """Leave so much room, in whole pages."""
        found = os.statvfs(self.folder)
        nbytes = found.f_bavail * found.f_frsize - left_nbytes // _PAGE * _PAGE
        self._ballast.write_bytes(bytes(max(nbytes, 0)))

    def free(self) -> None:
        """Give all room back."""
        self._ballast.unlink()


class SmallFiles:
    """A folder in which files may not grow."""

    kind = "file size limit"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, left_nbytes: int) -> None:
        """Let no file have more bytes."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (left_nbytes // 16, self._before[1]))

    def free(self) -> None:
        """Let files grow."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@contextmanager
def small_disk() -> Generator[Disk]:
    """Make a disk for a while."""
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_NBYTES}", "none", name]
        try:
            is_mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
        except OSError:
            is_mounted = False
        disk = SmallDisk(Path(name)) if is_mounted else SmallFiles(Path(name))
        try:
            yield disk
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", name], capture_output=True, check=True)
            else:
                disk.free()


class StoredWorld:
    """A training whose versions can be had from an object store alone."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed=seed, scale=_SCALE)
        self.writer = ObjectWriter(self.world.publisher, f"file://{folder}", self._announce)

    def publish(self) -> VersionInfo:
        """Publish a version, and write it as far as that is possible."""
        info = self.world.publish()
        self.writer.wake()
        self.writer.sync()
        return self.world.infos[info.version]

    def _announce(self, info: VersionInfo) -> None:
        self.world.infos[info.version] = replace(
            self.world.infos[info.version], sources=info.sources
        )


async def _fill_store(counts: Counts, rng: Random, seed: int) -> None:
    """Let a store run full while it is written to; once it has room again a reader goes on."""
    with small_disk() as disk:
        stored = StoredWorld(seed, disk.folder)
        receiver = Receiver(stored.world)
        for _ in range(2):
            outcome = await receiver.pull(stored.publish())
        disk.fill(rng.randrange(0, 12 * _PAGE))
        kinds: set[str] = set()
        for _ in range(rng.randrange(1, 4)):
            info = stored.publish()
            if info.sources:
                kinds.add("had room")
                outcome = await receiver.pull(info)
            else:
                kinds.add("had none")
                outcome = await _unfinished(receiver, stored, info)
            if outcome.corruption:
                break
        disk.free()
        if not outcome.corruption:
            outcome = await receiver.pull(stored.publish())
        if "had none" in kinds:
            count(counts, disk.kind, outcome, "")
        await receiver.puller.close()


async def _unfinished(receiver: Receiver, stored: StoredWorld, info: VersionInfo) -> Outcome:
    """Ask for a version that was not announced: there must not be a part of it."""
    uri = f"{stored.writer.url}/{info.version}"
    source = replace(sources(("",))[0], kind=SourceKind.OBJECT_STORE, endpoint="", uri=uri)
    return await receiver.pull(replace(info, sources=(source,)))


async def _fill_node(counts: Counts, rng: Random, seed: int) -> None:
    """Let the disk of a node run full; it goes on, and so does who takes its place."""
    world = World(seed=seed, scale=_SCALE)
    with small_disk() as disk, WeightServer(world.publisher) as server:
        server.set_transfer_token(TOKEN)
        world.endpoints = (server.endpoint,)
        receiver, copy = _with_copy(world, disk)
        for _ in range(2):
            await receiver.pull(world.publish())
            await receiver.puller.flush()
        disk.fill(rng.randrange(0, 3 * _PAGE))
        corruption = ""
        for _ in range(rng.randrange(1, 4)):
            outcome = await receiver.pull(world.publish())
            await receiver.puller.flush()
            corruption = corruption or outcome.corruption or _error(outcome)
        is_full = copy.failure_count > 0
        if rng.random() < 0.5:
            disk.free()
            for _ in range(rng.randrange(3)):
                corruption = corruption or (await receiver.pull(world.publish())).corruption
        await receiver.puller.close()
        receiver, _ = _with_copy(world, disk)
        outcome = await receiver.pull(world.publish())
        await receiver.puller.close()
        if is_full:
            count(
                counts, disk.kind, replace(outcome, corruption=corruption or outcome.corruption), ""
            )


def _with_copy(world: World, disk: Disk) -> tuple[Receiver, DiskCopy]:
    copy = DiskCopy.open(disk.folder)
    receiver = Receiver(world)
    # A file size limit holds for shared memory too, which is not what is tried here.
    receiver.puller = WeightPuller(POLICY, lane=GrpcLane(), copy=copy)
    return receiver, copy


def _error(outcome: Outcome) -> str:
    return (
        "" if outcome.error is None else f"a full disk of its own cost a version: {outcome.error}"
    )
