"""Every record that a journal ever had, also those that a snapshot took the place of."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from astraflow.core.errors import AstraflowError
from astraflow.storage.sqlite import bounds_of, open_for_reading, read_rows

_LIMIT = 1 << 20


class Archive:
    """Copies a journal as it grows; the records of a hub that was killed are there as well.

    Attributes:
        records: By position, from 0 on.
    """

    identity = b""

    def __init__(self, path: Path) -> None:
        self.records: list[bytes] = []
        self._path = path

    @property
    def end(self) -> int:
        """Position of the next record."""
        return len(self.records)

    def catch_up(self) -> None:
        """Copy what is new.

        Raises:
            RuntimeError: A record was let go before it was copied: look more often.
        """
        if not self._path.exists():
            return
        try:
            with closing(open_for_reading(self._path)) as database:
                first, end = bounds_of(database)
                if first > self.end:
                    raise RuntimeError(f"records {self.end} to {first} were not seen")
                if end < self.end:
                    raise RuntimeError(f"the journal ends at {end}, it ended at {self.end}")
                self.records += read_rows(self._path, database, self.end, _LIMIT)
        except (sqlite3.OperationalError, AstraflowError):
            # A hub that is making the file, or died as it did, has no tables in it yet.
            if self.records:
                raise

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        """Return records, as a journal does."""
        return self.records[start : start + limit]
