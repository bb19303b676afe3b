"""A small disk of its own for the hub of a run."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """A tmpfs that a process with the right to mount it can make smaller, larger or read-only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resize(self, nbytes: int) -> None:
        """Have so much room, with what lies there."""
        self._remount(f"size={nbytes}")

    def protect(self) -> None:
        """Let nothing more be written; what is open for writing hinders it."""
        self._remount("ro")

    def permit(self) -> None:
        """Let it be written again."""
        self._remount("rw")

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", self._path], check=True)


@contextmanager
def small_disk(path: Path, *, nbytes: int) -> Generator[SmallDisk]:
    """Mount a disk on a folder.

    Raises:
        PermissionError: This process may not.
    """
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise PermissionError(f"user {os.getuid()} may not mount")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
