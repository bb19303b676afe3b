"""Exported: the tensors of one version, read range by range; no second model is in memory."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.codec.runs import ChunkRange
from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.arrays import ReadBits, reader_of
from astraflow.weights.parts import Part, Piece


class Exported:
    """What a publisher was given.

    Attributes:
        gather_s: Seconds that reading took so far.
    """

    def __init__(self, part: Part, tensors: Mapping[str, Any]) -> None:
        """Check names, shapes and types; nothing is read yet.

        Args:
            part: What of the layout is published.
            tensors: Every tensor of the layout, by name; see `reader_of`.

        Raises:
            AstraflowError: LAYOUT_MISMATCH naming the tensor.
        """
        by_name = part.layout.by_name
        if tensors.keys() != by_name.keys():
            names = sorted(tensors.keys() ^ by_name.keys())
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH, f"tensors and layout differ in {', '.join(names[:5])}"
            )
        self.gather_s = 0.0
        self._scratch = np.empty(CHUNK_NBYTES, np.uint8)
        self._reads = {
            name: reader_of(tensors[name], by_name[name], part.shard) for name in by_name
        }
        self._pieces = part.pieces
        self._starts = [piece.offset for piece in part.pieces]

    def bits(self, where: ChunkRange) -> np.ndarray:
        """Return the bits of a range, uN[element_count]: valid until the next call.

        They are a view where the range lies in one tensor.
        """
        started = perf_counter()
        count = where.nbytes // where.dtype.itemsize
        parts = [*self._parts(where)]
        if len(parts) == 1 and len(parts[0][1]) == count:
            bits = parts[0][1]
        else:
            bits = self._scratch[: where.nbytes].view(where.dtype.bits)
            if sum(len(found) for _, found in parts) < count:
                bits[:] = 0
            for at, found in parts:
                bits[at : at + len(found)] = found
        self.gather_s += perf_counter() - started
        return bits

    def _parts(self, where: ChunkRange) -> Iterator[tuple[int, np.ndarray]]:
        """Yield what of each tensor lies in a range, and at which element of the range."""
        at = max(bisect_right(self._starts, where.offset) - 1, 0)
        while at < len(self._pieces) and self._starts[at] < where.end:
            piece = self._pieces[at]
            start, end = max(piece.offset, where.offset), min(piece.end, where.end)
            if start < end:
                yield (start - where.offset) // where.dtype.itemsize, self._read(piece, start, end)
            at += 1

    def _read(self, piece: Piece, start: int, end: int) -> np.ndarray:
        read: ReadBits = self._reads[piece.spec.name]
        size = piece.dtype.itemsize
        return read((start - piece.offset) // size, (end - piece.offset) // size)
