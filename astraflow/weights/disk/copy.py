"""DiskCopy: a node's last verified version on disk, so that a killed node rejoins by a patch.

Patches are appended to files as they come, and a record, replaced at once, says which of them make
the state. So a version costs the disk the bytes of its patch, and nothing is ever written in place.
Now and then the state itself is written, and takes the place of the patches before it. All of that
is done beside the pulls, in a thread of low priority: a disk that is full or slow costs the copy,
never a version. A state is copied range by range while later versions are written over it.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final, Self

import numpy as np
import structlog

from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk, ChunkRange
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import VersionInfo
from astraflow.storage.lock import FileLock
from astraflow.weights.disk.files import (
    LAYOUT,
    LOCK,
    RECORD,
    Loaded,
    PatchWriter,
    Record,
    base_file,
    load,
    patch_file,
    replace_file,
    replacing,
)
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.state import HeldState, StagedState
from astraflow.weights.publish.background import lower_priority
from astraflow.wire.weights import PatchIndex, encode_layout

_BLOCK_NBYTES: Final = 1 << 20


class Snapshots:
    """Commits versions, and copies one of them while later ones are committed.

    Every change knows the bits that it takes the place of. A commit waits for one range that is
    being copied, never for the rest.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: HeldState | None = None
        self._copied: HeldState | None = None
        self._changes: list[Change] = []

    def hold(self, held: HeldState | None) -> None:
        with self._lock:
            self._held = held

    def commit(self, staged: StagedState) -> HeldState:
        with self._lock:
            if self._copied is not None and self._copied.flat is staged.state.flat:
                self._changes.extend(staged.changes)
            self._held = staged.commit()
            return self._held

    @contextmanager
    def copying(self) -> Generator[HeldState | None]:
        """Give the version that is held now, for `blocks` to copy; None: there is none."""
        with self._lock:
            copied = self._copied = self._held
        try:
            yield copied
        finally:
            self._end()

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the version that is copied, by offset: u8[up to a block], copies."""
        flat = np.zeros(0, np.uint8) if self._copied is None else self._copied.flat
        for first in range(0, len(flat), _BLOCK_NBYTES):
            with self._lock:
                changes = self._changes[::-1]
                block = flat[first : first + _BLOCK_NBYTES].copy()
            _undo(block, first, changes)
            yield block
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._copied, self._changes = None, []


def _undo(block: np.ndarray, first: int, changes: Sequence[Change]) -> None:
    """Take changes back, the newest first."""
    for change in changes:
        itemsize = change.dtype.itemsize
        place = first // itemsize
        indices, part = change.between(place, place + len(block) // itemsize)
        bits = block[: len(block) // itemsize * itemsize].view(change.dtype.bits)
        bits[indices] = change.before[part]


# What is loaded is applied again: 16 patches at 10 GB/s take as long as reading the state does.
MAX_STEPS: Final = 16
_MAX_PATCH_SHARE: Final = 0.25

# Versions that pass before a state that could not be written is tried again, at most.
_MAX_PAUSE: Final = 64


class DiskWriter:
    """Appends patches, records versions, and writes the state when it is shorter to load."""

    def __init__(self, folder: Path, snapshots: Snapshots, *, max_steps: int) -> None:
        self._max_steps = max_steps
        self._folder = folder
        self._snapshots = snapshots
        self._frame: ShardLayout | None = None
        self._record = Record()
        self._writers: dict[bytes, PatchWriter] = {}
        self._is_behind = False
        self._pause = self._not_before = 0

    def go_on(self, record: Record) -> None:
        """Take what was loaded for what is held."""
        self._record = record

    def write_layout(self, frame: ShardLayout) -> None:
        if self._frame is not None and self._frame.digest == frame.digest:
            return
        content = encode_layout(frame.layout).SerializeToString(deterministic=True)
        replace_file(self._folder / LAYOUT, content)
        self._frame = frame

    def write_chunk(self, index: PatchIndex, chunk: Chunk) -> None:
        if self._is_behind:
            return
        root = index.patch.root_digest
        try:
            if root not in self._writers:
                self._writers[root] = PatchWriter(self._folder, index)
            self._writers[root].append(chunk)
        except OSError:
            self._drop(root)
            raise

    def enter(self, versions: Sequence[VersionInfo], base_version: int | None) -> None:
        """Record what led to the version that is held now, or write the state instead."""
        roots = [patch.root_digest for each in versions for patch in each.patches]
        writers = [self._writers.get(root) for root in roots]
        is_there = all(each is not None and each.is_complete for each in writers)
        before = () if base_version is None else self._record.versions
        is_next = base_version is None or self._record.version == base_version
        try:
            if self._frame is None or not is_next or not is_there or self._is_behind:
                self._is_behind = True
            else:
                self._take(Record(versions=(*before, *versions)))
        except OSError:
            self._is_behind = True
            raise
        nbytes = self._record.patch_nbytes
        is_long = len(self._record.steps) > self._max_steps or (
            self._frame is not None and nbytes > _MAX_PATCH_SHARE * self._frame.layout.nbytes
        )
        if self._is_behind or is_long:
            self._write_state(versions[-1])

    def close(self) -> None:
        for writer in self._writers.values():
            with suppress(OSError):
                writer.close()
        self._writers.clear()

    def _take(self, record: Record) -> None:
        """Let a record count, then remove what it does not need."""
        replace_file(self._folder / RECORD, record.to_bytes())
        self._record = record
        self.close()
        for path in self._folder.iterdir():
            if path.name not in {LAYOUT, RECORD, LOCK, *record.names}:
                path.unlink()

    def _write_state(self, newest: VersionInfo) -> None:
        """Write the state as it is now, verify what was written, and begin anew with it."""
        if newest.version < self._not_before:
            return
        try:
            with self._snapshots.copying() as held:
                if held is None or self._frame is None or held.frame.digest != self._frame.digest:
                    return
                with replacing(self._folder / base_file(held.version)) as part:
                    with part.open("wb") as file:
                        file.writelines(block.data for block in self._snapshots.blocks())
                    _verify(part, held)
            base = replace(
                newest,
                version=held.version,
                layout_digest=held.frame.digest,
                content_digest=held.digest.to_bytes(),
                patches=(),
            )
            self._take(Record(versions=(base,)))
        except OSError:
            self._pause = min(2 * self._pause + 1, _MAX_PAUSE)
            self._not_before = newest.version + self._pause
            raise
        self._is_behind, self._pause = False, 0

    def _drop(self, root: bytes) -> None:
        """Give up a file: what follows a torn chunk is lost, and without it there is room."""
        writer = self._writers.pop(root, None)
        with suppress(OSError):
            if writer is not None:
                writer.close()
        with suppress(OSError):
            (self._folder / patch_file(root)).unlink()


def _verify(path: Path, held: HeldState) -> None:
    with path.open("rb") as file:
        digest = StateDigest.of_pieces(_pieces(file, held.frame))
    if digest != held.digest:
        raise OSError(f"{path} does not hold what was written to it")


def _pieces(file: BinaryIO, frame: ShardLayout) -> Iterator[tuple[ChunkRange, np.ndarray]]:
    """Yield the tensors of a file, 4 MiB at a time: a mapped file that fails ends the process."""
    for where in chain.from_iterable(tensor.cut() for tensor in frame.pieces):
        file.seek(where.offset)
        yield where, np.frombuffer(file.read(where.nbytes), where.dtype.bits)


_PLACE_COUNT: Final = 64

# What may wait for a slow disk, beside half a state.
_ROOM_NBYTES: Final = 64 << 20

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class DiskCopy:
    """Keeps what one puller holds in a folder that no other process uses."""

    def __init__(self, folder: Path, lock: FileLock, *, max_steps: int) -> None:
        self.folder = folder
        self.failure_count = 0
        self._lock = lock
        self._snapshots = Snapshots()
        self._writer = DiskWriter(folder, self._snapshots, max_steps=max_steps)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="astraflow-disk", initializer=lower_priority
        )
        # Of what is still to be written.
        self._waiting_nbytes = 0
        self._counting = threading.Lock()
        self._incoming: IncomingVersion | None = None
        self._noted_counts: dict[bytes, int] = {}
        self._room_nbytes = _ROOM_NBYTES

    @classmethod
    def open(cls, folder: Path, *, max_steps: int = MAX_STEPS) -> Self:
        """Take the first place in a folder that no other process has: its copy becomes ours.

        After more than `max_steps` versions by patches the state is written.

        Raises:
            AstraflowError: CAPABILITY_MISSING when nothing can be written there.
        """
        why: object = "64 other processes use it"
        for number in range(_PLACE_COUNT):
            place = folder / str(number)
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = error
                break
            with suppress(AstraflowError):
                lock = FileLock.take(place / LOCK)
                return cls(place, lock, max_steps=max_steps)
        raise AstraflowError(
            Reason.CAPABILITY_MISSING, f"no copy of weights can be kept in {folder}: {why}"
        )

    def load(self) -> Loaded:
        loaded = load(self.folder)
        self._writer.go_on(loaded.record)
        self._snapshots.hold(loaded.held)
        return loaded

    def forget(self) -> None:
        """Say that what was loaded is not held: the next version begins a new copy."""
        self._snapshots.hold(None)
        self._do(partial(self._writer.go_on, Record()))

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        """Take note of a pull that begins; its chunks go to disk as they come."""
        self._incoming, self._noted_counts = incoming, {}
        self._room_nbytes = _ROOM_NBYTES + frame.layout.nbytes // 2
        self._do(partial(self._writer.write_layout, frame))

    def note(self) -> None:
        for patch in () if self._incoming is None else self._incoming.planned:
            fresh = islice(patch.chunks.values(), self._noted_counts.get(patch.root, 0), None)
            self._noted_counts[patch.root] = len(patch.chunks)
            for chunk in fresh:
                # Of what came before an earlier pull failed only the decoded bits may be left.
                is_whole = len(chunk.payload) == chunk.header.payload_nbytes
                # The file lacks what a slow disk has no room for: then the state is written.
                if is_whole and self._waiting_nbytes <= self._room_nbytes:
                    write = partial(self._writer.write_chunk, patch.index, chunk)
                    self._do(write, len(chunk.payload))

    def commit(
        self, staged: StagedState, known: Mapping[int, VersionInfo], base_version: int | None
    ) -> HeldState:
        """Write a version into the held state; what led to it is recorded beside."""
        held = self._snapshots.commit(staged)
        if self._incoming is not None:
            # Version by version, each with the patches that lead to it.
            planned = (patch.info for patch in self._incoming.planned)
            infos = groupby(planned, lambda info: info.version)
            versions = [replace(known[at], patches=(*step,), sources=()) for at, step in infos]
            self._incoming = None
            if versions:
                self._do(partial(self._writer.enter, versions, base_version))
        return held

    def flush(self) -> None:
        """Wait until all of that lies on disk, or has failed to; beside the event loop."""
        with suppress(RuntimeError, CancelledError):  # It was closed.
            self._thread.submit(bool).result()

    def close(self) -> None:
        """Stop after the file that is being written; the place is free for others."""
        self._thread.shutdown(cancel_futures=True)
        self._writer.close()
        self._lock.release()

    def _do(self, job: Callable[[], None], nbytes: int = 0) -> None:
        """Do a job after those before it; meanwhile it keeps so many bytes in memory."""

        def run() -> None:
            try:
                job()
            except OSError as error:
                self.failure_count += 1
                log.warning(
                    "the copy on disk is behind, the weights are not",
                    folder=str(self.folder),
                    failure_count=self.failure_count,
                    why=str(error),
                )
            finally:
                self._count(-nbytes)

        with suppress(RuntimeError):  # It was closed.
            done = self._thread.submit(run)
            self._count(nbytes)
            # A defect shows in the log.
            done.add_done_callback(lambda each: each.cancelled() or each.result())

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._waiting_nbytes += nbytes
