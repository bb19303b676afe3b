"""A place in the bytes of a body; nothing is read past their end."""

from struct import Struct

from astraflow.gateway.pickles.budget import refused

_DOUBLE = Struct(">d")
# Longer lines are no number and no name.
_LINE_NBYTES = 1 << 12


class Cursor:
    """Reads on from where it stands.

    Attributes:
        at: Offset of the next byte.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes that were not read."""
        return len(self._body) - self.at

    def take(self, count: int) -> memoryview:
        """Return the next bytes, without a copy."""
        if count > self.left:
            raise refused(f"it ends {count - self.left} bytes early")
        start, self.at = self.at, self.at + count
        return self._body[start : self.at]

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def uint(self, count: int) -> int:
        """Return a little-endian number without a sign."""
        return int.from_bytes(self.take(count), "little")

    def sint(self, count: int) -> int:
        """Return a little-endian number with a sign."""
        return int.from_bytes(self.take(count), "little", signed=True)

    def double(self) -> float:
        """Return a big-endian double."""
        return float(_DOUBLE.unpack(self.take(8))[0])

    def line(self, limit: int = _LINE_NBYTES) -> bytes:
        """Return the bytes up to the next line feed, which is skipped."""
        window = bytes(self._body[self.at : self.at + limit])
        end = window.find(b"\n")
        if end < 0:
            raise refused("a line of it has no end")
        self.at += end + 1
        return window[:end]
