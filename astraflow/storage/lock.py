"""A lock on a file that ends with its process, however that ends."""

import fcntl
import os
from pathlib import Path
from typing import Self

from astraflow.core.errors import AstraflowError, Reason


def lock_beside(path: Path) -> Path:
    """Return the lock of whoever has a file."""
    return path.with_name(f"{path.name}.lock")


class FileLock:
    """Held by one process at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path) -> Self:
        """Take the lock at once; its folder is made.

        Raises:
            AstraflowError: JOURNAL_FAILED when another process has it, or it cannot be made or
                locked.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AstraflowError(
                Reason.JOURNAL_FAILED, f"{path} cannot be made ({error}); make its folder writable"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            why = f"cannot be locked ({error}); it has to be on a file system that has locks"
            if isinstance(error, BlockingIOError):
                why = "is held by another process; a run has one hub: stop the other one first"
            raise AstraflowError(Reason.JOURNAL_FAILED, f"{path} {why}") from error
        return cls(descriptor)

    def release(self) -> None:
        """Let go; repeating it is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
