"""Exported: the tensors of one version, read range by range; no second model is in memory."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from threading import local
from time import perf_counter

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.codec.runs import ChunkRange
from astraflow.weights.arrays import ReadBits
from astraflow.weights.parts import Part, Piece


class Exported:
    """What a publisher was given.

    Attributes:
        gather_s: Seconds that reading took so far, of all threads together.
    """

    def __init__(self, part: Part, reads: Mapping[str, ReadBits]) -> None:
        """Prepare; nothing is read yet.

        Args:
            part: What of the layout is published.
            reads: Of every tensor of the layout, by name.
        """
        self.gather_s = 0.0
        self._scratch = _Scratch()
        self._reads = reads
        self._pieces = part.pieces
        self._starts = [piece.offset for piece in part.pieces]

    def bits(self, where: ChunkRange) -> np.ndarray:
        """Return the bits of a range, uN[element_count]: valid until this thread's next call.

        They are a view where the range lies in one tensor.
        """
        started = perf_counter()
        bits = self._gathered(where)
        self.gather_s += perf_counter() - started
        return bits

    def _gathered(self, where: ChunkRange) -> np.ndarray:
        size, count = where.dtype.itemsize, where.nbytes // where.dtype.itemsize
        room = self._scratch.buffer[: where.nbytes].view(where.dtype.bits)
        done = 0
        for piece, start, end in self._touching(where):
            at, stop = (start - where.offset) // size, (end - where.offset) // size
            found = self._read(piece, start, end, room[at:stop])
            if len(found) == count:
                # A view of what was given, perhaps, which is nobody's to write to.
                return found
            if found.base is not room.base:
                room[at:stop] = found
            room[done:at] = 0
            done = stop
        room[done:] = 0
        return room

    def _touching(self, where: ChunkRange) -> Iterator[tuple[Piece, int, int]]:
        """Yield the pieces that lie in a range, and their first byte and end there."""
        at = max(bisect_right(self._starts, where.offset) - 1, 0)
        while at < len(self._pieces) and self._starts[at] < where.end:
            piece = self._pieces[at]
            start, end = max(piece.offset, where.offset), min(piece.end, where.end)
            if start < end:
                yield piece, start, end
            at += 1

    def _read(self, piece: Piece, start: int, end: int, into: np.ndarray) -> np.ndarray:
        read = self._reads[piece.spec.name]
        size = piece.dtype.itemsize
        return read((start - piece.offset) // size, (end - piece.offset) // size, into)


class _Scratch(local):
    """Room for one range, for each thread that reads."""

    def __init__(self) -> None:
        self.buffer = np.empty(CHUNK_NBYTES, np.uint8)
