"""JSON-lines files that may grow while they are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

_READ_NBYTES: Final = 1 << 24


class GrowingLines:
    """One such file: every line is yielded once, and found again by where it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    @property
    def left_nbytes(self) -> int:
        """What has not been yielded yet, a torn last line included."""
        return self.path.stat().st_size - self.offset if self.path.exists() else 0

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines that came since the last call, each with its offset."""
        if self.left_nbytes <= 0:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while lines := file.readlines(_READ_NBYTES):
                for line in lines:
                    # What is not a whole line yet comes with the next call.
                    if not line.endswith(b"\n"):
                        return
                    yield self.offset, line
                    self.offset += len(line)

    def at(self, offset: int) -> dict[str, Any]:
        """Return the object of the line that begins there."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return from_json(file.readline())
