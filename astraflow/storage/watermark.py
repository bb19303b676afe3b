"""The watermark of a journal: how far it has come that somebody may know of.

It lies beside the journal in a file of its own and rises after each commit, before anything that
was committed is acknowledged. So a journal whose end was lost (its write-ahead file, or the file
itself, or an older copy in its place) is told from one that merely ends there.
"""

import os
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

_MAGIC = b"afmark01"
# Magic, identity of the journal, end; then a CRC-32 over these.
_BODY = Struct("<8s16sQ")
_CHECKSUM = Struct("<I")


class Level(NamedTuple):
    """What a watermark says.

    Attributes:
        identity: 16 bytes, of the journal that it belongs to.
        end: Position after the last record that may have been acknowledged.
    """

    identity: bytes
    end: int


def watermark_of(journal: Path) -> Path:
    """Return where the watermark of a journal lies."""
    return journal.with_name(journal.name + ".watermark")


def read_level(journal: Path) -> Level | None:
    """Return the level of a journal; None: there is no sound watermark."""
    try:
        data = watermark_of(journal).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _BODY.size + _CHECKSUM.size:
        return None
    body, said = data[: _BODY.size], _CHECKSUM.unpack(data[_BODY.size :])[0]
    magic, identity, end = _BODY.unpack(body)
    return Level(identity, end) if magic == _MAGIC and said == crc32(body) else None


class Watermark:
    """Raised by the one process that writes the journal."""

    def __init__(self, journal: Path, level: Level) -> None:
        """Write a first level."""
        self._identity = level.identity
        path = watermark_of(journal)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, _BODY.size + _CHECKSUM.size)
        self.rise(level.end)

    def rise(self, end: int) -> None:
        """Set the end; one write, which a kill does not tear."""
        body = _BODY.pack(_MAGIC, self._identity, end)
        os.pwrite(self._descriptor, body + _CHECKSUM.pack(crc32(body)), 0)

    def close(self) -> None:
        os.close(self._descriptor)
