"""Exchange folders: updates as files in shared memory, each written once and read once."""

import asyncio
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import WeightUpdate
from astraflow.engines import plugins
from astraflow.engines.plugins.exchange import MAGIC, aligned

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - folders of their own are made in it

_PREFIX: Final = "astraflow-owned-"

# Nobody looks at these: the lock is not taken yet.
_NEW_PREFIX: Final = "astraflow-new-"


class ExchangeFolder:
    """A folder in memory that a server reads updates from, and imports what reads them.

    It is this process's until it closes it, or dies.

    A lock on the folder says so. Linux lets go of it with the process; the number of a process
    may be another's by then, or mean nothing in another container that shares the memory.

    An update that would take more than half of the memory goes by way of the disk: containers have
    64 MiB by default, and a server whose own part of it cannot grow is killed (SIGBUS).

    Attributes:
        path: Where it is.
    """

    def __init__(self, name: str, *, parent: Path | None = None) -> None:
        """Make it, and remove those beside it whose processes have died; a link in it is imported.

        Args:
            name: For people who find it.
            parent: None: shared memory, or where there is none, the place of temporary files.
        """
        parent = parent or _memory()
        remove_ownerless(parent)
        self._name = name
        self._on_disk: ExchangeFolder | None = None
        made = Path(tempfile.mkdtemp(prefix=f"{_NEW_PREFIX}{name}-", dir=parent))
        self._lock: int | None = _locked(made)
        self.path = made.rename(parent / made.name.replace(_NEW_PREFIX, _PREFIX, 1))
        python = self.path / "python"
        python.mkdir()
        (python / "astraflow_plugins").symlink_to(Path(plugins.__file__).parent)

    def close(self) -> None:
        if self._on_disk is not None:
            self._on_disk.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @asynccontextmanager
    async def file(self, update: WeightUpdate) -> AsyncGenerator[Path]:
        """Write an update; the file is there as long as the body runs.

        Raises:
            AstraflowError: CAPACITY_EXCEEDED when there is no room for it on the disk either.
        """
        nbytes = sum(
            part.values.nbytes + (0 if part.indices is None else 8 * part.indices.size)
            for part in update.tensors
        )
        path = self.folder_for(nbytes) / f"{update.version}.update"
        try:
            with written(nbytes):
                await asyncio.to_thread(write_update, path, update)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def folder_for(self, nbytes: int) -> Path:
        """Return the folder that a file of so many bytes goes to."""
        disk, free = Path(tempfile.gettempdir()), shutil.disk_usage(self.path).free
        if 2 * nbytes <= free or self.path.parent == disk:
            return self.path
        if self._on_disk is None:
            self._on_disk = ExchangeFolder(self._name, parent=disk)
            log.warning(
                "updates go by way of the disk: shared memory is too small for them",
                free_nbytes=free,
                nbytes=nbytes,
                path=str(self._on_disk.path),
            )
        return self._on_disk.path


@contextmanager
def written(nbytes: int) -> Generator[None]:
    """Write files of so many bytes together in a block.

    Raises:
        AstraflowError: CAPACITY_EXCEEDED when there is no room for them.
    """
    try:
        yield
    except OSError as error:
        raise AstraflowError(
            Reason.CAPACITY_EXCEEDED,
            f"an update of {nbytes / 1e6:,.0f} MB cannot be handed to a server ({error}); give the "
            "container shared memory (docker run --shm-size or --ipc=host), or point TMPDIR at a "
            "disk with room",
        ) from error


def remove_ownerless(parent: Path) -> None:
    """Remove the folders in `parent` whose processes have died."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _locked(path)
        except OSError:  # its owner lives, it is another user's, or somebody was faster
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(path: Path) -> int:
    """Lock a folder and return the descriptor that holds the lock.

    Raises:
        OSError: Another process has the lock, or the folder cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _memory() -> Path:
    is_there = os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if is_there else Path(tempfile.gettempdir())


def write_update(path: Path, update: WeightUpdate) -> None:
    """Write an update as `plugins.exchange` reads it; no copy of its arrays is made."""
    tensors, arrays = _laid_out(update)
    said = {"version": update.version, "base_version": update.base_version, "tensors": tensors}
    header = json.dumps(said).encode()
    start = len(MAGIC) + 8 + len(header)
    with path.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for offset, array in arrays:
            file.seek(aligned(start) + offset)
            file.write(np.ascontiguousarray(array).data)


def _laid_out(update: WeightUpdate) -> tuple[list[dict[str, Any]], list[tuple[int, np.ndarray]]]:
    """Return what the header says of each tensor, and the arrays with their offsets."""
    tensors: list[dict[str, Any]] = []
    arrays: list[tuple[int, np.ndarray]] = []
    end = 0

    def place(array: np.ndarray) -> int:
        nonlocal end
        offset, end = end, aligned(end + array.nbytes)
        arrays.append((offset, array))
        return offset

    for part in update.tensors:
        indices = None if part.indices is None else part.indices.astype(np.int64, copy=False)
        tensors.append(
            {
                "name": part.spec.name,
                "dtype": str(part.spec.dtype),
                "shape": part.spec.shape,
                "count": part.values.size,
                "indices": None if indices is None else place(indices),
                "values": place(part.values.reshape(-1)),
            }
        )
    return tensors, arrays
