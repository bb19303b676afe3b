"""The journal: records in the order in which they were appended.

A record is bytes; what they mean is the business of who wrote them. Positions start at
0, grow by one per record and are never used twice, also after a trim.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from astraflow.core.errors import AstraflowError, Reason


class JournalRecords(Protocol):
    """What can be read of a journal."""

    @property
    def identity(self) -> bytes:
        """What tells it from every other journal; empty: nothing does."""
        ...

    @property
    def end(self) -> int:
        """Position of the next record."""
        ...

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        """Return at most `limit` records from position `start` on; empty at the end.

        Raises:
            AstraflowError: JOURNAL_FAILED when one was trimmed, is damaged or lies past the end.
        """
        ...


class Journal(JournalRecords, Protocol):
    """An append-only list of records, trimmed at its old end.

    Example:
        With three records appended, `first` is 0 and `end` 3; after `trim(2)` `first` is 2
        and the next record is at position 3.
    """

    @property
    def first(self) -> int:
        """Position of the oldest record that is kept; `end` when there is none."""
        ...

    async def append(self, records: Sequence[bytes]) -> int:
        """Keep records; on return they are as safe as this journal makes them.

        Returns:
            The position of the first of them.

        Raises:
            AstraflowError: JOURNAL_FAILED when they cannot be written or it is closed.
        """
        ...

    async def trim(self, before: int, *, spare_nbytes: int = 0) -> None:
        """Let go of every record below position `before`; repeating it is harmless.

        Args:
            before: Position of the oldest record that is kept.
            spare_nbytes: Of their room, so much may be kept for records to come.
        """
        ...

    async def fenced(self) -> None:
        """Wait until another process has taken the journal; for ever where none can.

        Raises:
            AstraflowError: JOURNAL_FAILED, in the end.
        """
        ...

    async def close(self) -> None:
        """Let nothing more be appended; repeating it is harmless."""
        ...


class InMemoryJournal:
    """A journal that lives as long as its process."""

    def __init__(self) -> None:
        self.identity = b""
        self._records: deque[bytes] = deque()
        self.first = 0
        self._is_closed = False

    @property
    def end(self) -> int:
        return self.first + len(self._records)

    async def append(self, records: Sequence[bytes]) -> int:
        if self._is_closed:
            raise AstraflowError(Reason.JOURNAL_FAILED, "the journal is closed")
        position = self.end
        self._records.extend(records)
        return position

    async def read(self, start: int, *, limit: int) -> Sequence[bytes]:
        if not self.first <= start <= self.end:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"position {start} is not kept; the journal has {self.first} to {self.end}",
            )
        offset = start - self.first
        return tuple(islice(self._records, offset, offset + limit))

    async def trim(self, before: int, *, spare_nbytes: int = 0) -> None:
        del spare_nbytes
        while self._records and self.first < before:
            self._records.popleft()
            self.first += 1

    async def fenced(self) -> None:
        """Wait for ever: nobody else has it."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._is_closed = True
