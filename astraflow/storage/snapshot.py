"""A snapshot: replaced whole, with a checksum, safe before it counts."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Protocol
from zlib import crc32

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.fault_points import FaultPoint, hit

# The first releases wrote no identity.
_FIRST_MAGIC = b"afsnap01"
_MAGIC = b"afsnap02"
# Checksum and size of what follows.
_HEAD = Struct("<IQ")
_IDENTITY_NBYTES = 16


class Snapshot(Protocol):
    """What takes the place of a journal's old records; there whole, or not at all.

    Its text says where it is.
    """

    def write(self, data: bytes, *, identity: bytes, position: int) -> None:
        """Replace it; on return it outlives the machine.

        Args:
            data: The state.
            identity: Of the journal whose records it takes the place of.
            position: Of the first record whose place it does not take.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be written; the one before is still there.
        """
        ...

    def read(self, *, identity: bytes) -> bytes | None:
        """Return what was written last; None: nothing was.

        Args:
            identity: Of the journal beside it; empty: of any.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be read, is damaged or of another journal.
        """
        ...


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot in a file of its own."""

    path: Path

    def __str__(self) -> str:
        """Return where it is, for people."""
        return str(self.path)

    def write(self, data: bytes, *, identity: bytes, position: int) -> None:
        del position
        draft = self.path.with_name(self.path.name + ".draft")
        data = identity.ljust(_IDENTITY_NBYTES, b"\0") + data
        try:
            with draft.open("wb") as file:
                file.write(_MAGIC + _HEAD.pack(crc32(data), len(data)))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            hit(FaultPoint.SNAPSHOT_DRAFTED)
            draft.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            # What is left of a full disk is the journal's.
            with suppress(OSError):
                draft.unlink()
            raise AstraflowError(
                Reason.JOURNAL_FAILED, f"{self.path} cannot be written ({error}); make room for it"
            ) from error

    def read(self, *, identity: bytes) -> bytes | None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._damaged(str(error)) from error
        head, data = content[: len(_MAGIC) + _HEAD.size], content[len(_MAGIC) + _HEAD.size :]
        if len(head) < len(_MAGIC) + _HEAD.size or not head.startswith((_MAGIC, _FIRST_MAGIC)):
            raise self._damaged("it is no snapshot")
        checksum, nbytes = _HEAD.unpack(head[len(_MAGIC) :])
        if nbytes != len(data) or checksum != crc32(data):
            raise self._damaged("its checksum is wrong")
        if head.startswith(_FIRST_MAGIC):
            return data
        said, data = data[:_IDENTITY_NBYTES], data[_IDENTITY_NBYTES:]
        if identity and said.strip(b"\0") and said != identity:
            raise self._damaged("it belongs to another journal than the one beside it")
        return data

    def _damaged(self, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.JOURNAL_FAILED,
            f"{self.path} cannot be used: {why}; restore it from a copy, or move its folder aside "
            "to begin the run anew from the trainer's last checkpoint",
        )
