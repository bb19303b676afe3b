"""DiskCopy: a node's last verified version on disk, so that a killed node rejoins by a patch.

Patches are appended to files as they come, and a record, replaced at once, says which of them make
the state. So a version costs the disk the bytes of its patch, and nothing is ever written in place.
Now and then the state itself is written, and takes the place of the patches before it. All of that
is done beside the pulls, in a thread of low priority: a disk that is full or slow costs the copy,
never a version.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Final, Self

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import VersionInfo
from astraflow.storage.lock import FileLock
from astraflow.weights.disk.files import LOCK, Loaded, RecordStep, load
from astraflow.weights.disk.writer import MAX_STEPS, DiskWriter, Snapshots
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layout_frame import LayoutFrame
from astraflow.weights.patches.state import HeldState, StagedState
from astraflow.weights.publish.background import lower_priority

_PLACE_COUNT: Final = 64

# What may wait for a slow disk, beside half a state.
_ROOM_NBYTES: Final = 64 << 20

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class DiskCopy:
    """Keeps what one puller holds in a folder that no other process uses.

    Attributes:
        folder: Of this copy.
        failure_count: Writes that failed.
    """

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

        Args:
            folder: Of all copies.
            max_steps: Versions by patches; after more the state is written.

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
        self._do(partial(self._writer.go_on, None))

    def begin(self, incoming: IncomingVersion, frame: LayoutFrame) -> None:
        """Take note of a pull that begins; its chunks go to disk as they come."""
        self._incoming, self._noted_counts = incoming, {}
        self._room_nbytes = _ROOM_NBYTES + frame.layout.nbytes // 2
        self._do(partial(self._writer.write_layout, frame))
        self.note()

    def note(self) -> None:
        for patch in () if self._incoming is None else self._incoming.planned:
            fresh = islice(patch.chunks.values(), self._noted_counts.get(patch.root, 0), None)
            self._noted_counts[patch.root] = len(patch.chunks)
            for chunk in fresh:
                # The file lacks what a slow disk has no room for: then the state is written.
                if self._waiting_nbytes <= self._room_nbytes:
                    write = partial(self._writer.write_chunk, patch.index, chunk)
                    self._do(write, len(chunk.payload))

    def commit(
        self, staged: StagedState, known: Mapping[int, VersionInfo], base_version: int | None
    ) -> HeldState:
        """Write a version into the held state; what led to it is recorded beside."""
        held = self._snapshots.commit(staged)
        if self._incoming is not None:
            steps = tuple(_steps(self._incoming, known))
            self._incoming = None
            if steps:
                self._do(partial(self._writer.enter, steps, base_version))
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


def _steps(incoming: IncomingVersion, known: Mapping[int, VersionInfo]) -> Iterator[RecordStep]:
    patches = (patch.info for patch in incoming.planned)
    for version, group in groupby(patches, key=lambda each: each.version):
        infos = [*group]
        yield RecordStep(
            version=version,
            digest=known[version].content_digest,
            roots=tuple(info.root_digest for info in infos),
            nbytes=sum(info.payload_nbytes for info in infos),
        )
