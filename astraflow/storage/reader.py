"""A journal as others read it, beside the process that writes it."""

from collections.abc import Sequence
from pathlib import Path

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.sqlite_file import bounds_of, open_for_reading, read_rows


class JournalReader:
    """The records that a journal's file has when this is made."""

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            AstraflowError: JOURNAL_FAILED when there is no journal.
        """
        self._path = path
        self._database = open_for_reading(path)
        self._first, self._end = bounds_of(self._database)

    @property
    def first(self) -> int:
        """Position of the oldest record."""
        return self._first

    @property
    def end(self) -> int:
        """Position after the newest record."""
        return self._end

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        """Return at most `limit` records from position `start` on.

        Raises:
            AstraflowError: JOURNAL_FAILED for a record that is damaged, missing or not kept.
        """
        limit = min(limit, self._end - start)
        records = read_rows(self._path, self._database, start, limit)
        if len(records) < limit:
            raise AstraflowError(
                Reason.JOURNAL_FAILED, f"{self._path} has no record {start + len(records)}"
            )
        return records

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()
