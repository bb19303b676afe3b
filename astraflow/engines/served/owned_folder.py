"""Owned folders: in shared memory, and gone with the process that made them, however it ends."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - folders of their own are made in it
_PREFIX: Final = "astraflow-owned-"
# Nobody looks at these: the lock is not taken yet.
_NEW_PREFIX: Final = "astraflow-new-"


class OwnedFolder:
    """A folder that is this process's until it closes it, or dies.

    A lock on the folder says so. Linux lets go of it with the process; the number of a process
    may be another's by then, or mean nothing in another container that shares the memory.

    Attributes:
        path: Where it is.
    """

    def __init__(self, name: str, *, parent: Path | None = None) -> None:
        """Make it, and remove those beside it whose processes have died.

        Args:
            name: For people who find it.
            parent: None: shared memory, or where there is none, the place of temporary files.
        """
        parent = parent or _memory()
        remove_ownerless(parent)
        made = Path(tempfile.mkdtemp(prefix=f"{_NEW_PREFIX}{name}-", dir=parent))
        self._lock: int | None = _locked(made)
        self.path = made.rename(parent / made.name.replace(_NEW_PREFIX, _PREFIX, 1))

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


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
    is_there = os.access(_SHARED_MEMORY, os.W_OK)
    return _SHARED_MEMORY if is_there else Path(tempfile.gettempdir())
