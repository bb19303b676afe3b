"""Placing: directories that readers see whole or not at all."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def placed(target: Path) -> Generator[Path]:
    """Yield an empty directory to write into; what is in it at the end becomes the target.

    Args:
        target: A directory that is there already gives way.
    """
    draft = drafted(target)
    yield draft
    place(draft, target)


def drafted(target: Path) -> Path:
    """Make an empty directory that `place` will make the target."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def drop_drafts(folder: Path) -> None:
    """Let go of what somebody who was killed has left half written."""
    for path in folder.glob(".*.draft"):
        shutil.rmtree(path)


def place(draft: Path, target: Path) -> None:
    """Make a directory the target, once all that is in it is on the disk."""
    for path in filter(Path.is_file, draft.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        draft.rename(target)
    except OSError:
        old = draft.with_suffix(".old")
        target.rename(old)
        draft.rename(target)
        shutil.rmtree(old)
