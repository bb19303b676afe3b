"""The cache of this user: what is downloaded or made once, and then found again."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from astraflow.core.errors import AstraflowError, Reason


def cache_dir() -> Path:
    """Return where models that astraflow makes are kept.

    Raises:
        AstraflowError: CAPACITY_EXCEEDED for a user without a home.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "astraflow"
    try:
        return Path.home() / ".cache" / "astraflow"
    except RuntimeError:
        why = "this user has no home; set HOME or XDG_CACHE_HOME to a folder that can be written"
        raise AstraflowError(Reason.CAPACITY_EXCEEDED, why) from None


def must_be_writable(folder: Path) -> None:
    """Refuse what would be made for a folder of the cache that cannot be written in the end.

    Raises:
        AstraflowError: CAPACITY_EXCEEDED.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if os.access(each, os.F_OK))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise AstraflowError(
            Reason.CAPACITY_EXCEEDED,
            f"the cache could not be written ({there} is no folder that this user may write to);"
            " point XDG_CACHE_HOME at one",
        )


@contextmanager
def making(nbytes: int, report: Callable[[str], None]) -> Generator[Path]:
    """Yield a folder to make something in, which is gone afterwards.

    One process at a time does so; what a killed one left is dropped.

    Raises:
        AstraflowError: CAPACITY_EXCEEDED when the disk is too small, or cannot be written.
    """
    cache = cache_dir()
    cure = f"make room in {cache}, or point XDG_CACHE_HOME at a larger disk"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("another process is filling the cache; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in cache.glob(".draft-*"):
                shutil.rmtree(left, ignore_errors=True)
            free = shutil.disk_usage(cache).free
            if free < nbytes:
                raise AstraflowError(
                    Reason.CAPACITY_EXCEEDED,
                    f"this takes up to {nbytes / 1e6:,.0f} MB while it is made, "
                    f"{free / 1e6:,.0f} MB are free; {cure}",
                )
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=cache) as draft:
                yield Path(draft)
    except OSError as error:
        raise AstraflowError(
            Reason.CAPACITY_EXCEEDED, f"the cache could not be written ({error}); {cure}"
        ) from error
