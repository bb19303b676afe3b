"""Layouts with all that is derived from them: what fits into one, and what of it one rank has.

Changes and chunks that do not fit are CHUNK_INVALID.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import ChunkHeader, ChunkRange, Runs, chunk_invalid
from astraflow.core.tensors import Layout, TensorSpec
from astraflow.wire.weights import layout_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of every tensor a rank has: rows, cut as `torch.chunk` cuts them.

    That is how FSDP2 shards parameters. Rank `r` of `count` has the rows from `r * ceil(n / count)`
    on, as many as that or as there are; scalars belong to rank 0.
    """

    rank: int = 0
    count: int = 1

    def rows(self, spec: TensorSpec) -> range:
        """Return its rows of a tensor; of a scalar, which counts as one row, none or this one."""
        row_count = spec.shape[0] if spec.shape else 1
        share = -(-row_count // self.count)
        return range(min(self.rank * share, row_count), min((self.rank + 1) * share, row_count))

    def shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return (len(self.rows(spec)), *spec.shape[1:]) if spec.shape else ()


WHOLE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPiece(ChunkRange):
    """Rows of one tensor."""

    spec: TensorSpec


class ShardLayout(Runs):
    """A shard's part of a layout: its pieces, how they are cut, and where they lie in memory.

    The whole layout is cut as `Runs` cuts it. Of a shard every piece is cut for itself, every
    4 MiB, and the pieces lie in memory one behind the other, each on a 64-byte boundary.
    `split`, `check_pieces` and `check_padding` are for a shard that is all of it.

    Attributes:
        pieces: By offset; those without bytes are left out.
        nbytes: Of the part in memory.
        payload_nbytes: Of all its ranges.
    """

    def __init__(self, layout: Layout, shard: Shard = WHOLE) -> None:
        super().__init__(layout)
        self.layout = layout
        self.shard = shard
        pieces: list[ShardPiece] = []
        for spec in layout.tensors:
            rows, row_count = shard.rows(spec), spec.shape[0] if spec.shape else 1
            if spec.nbytes and rows:
                row_nbytes = spec.nbytes // row_count
                offset, nbytes = spec.offset + rows.start * row_nbytes, len(rows) * row_nbytes
                pieces.append(ShardPiece(offset=offset, nbytes=nbytes, dtype=spec.dtype, spec=spec))
        self.pieces = tuple(pieces)
        self._starts = [piece.offset for piece in self.pieces]
        self._places: dict[int, int] = {}
        self.payload_nbytes = sum(where.nbytes for where in self.ranges())
        end = 0
        for where in self.ranges():
            self._places[where.offset] = where.offset if shard.count == 1 else end
            end += -(-where.nbytes // 64) * 64
        self.nbytes = layout.nbytes if shard.count == 1 else end

    @cached_property
    def digest(self) -> bytes:
        """The digest of the whole layout."""
        return layout_digest(self.layout)

    def ranges(self) -> Iterator[ChunkRange]:
        if self.shard.count == 1:
            return super().ranges()
        return chain.from_iterable(piece.cut() for piece in self.pieces)

    def place(self, where: ChunkRange) -> slice:
        """Return where a range, one of `ranges()`, lies in memory."""
        start = self._places[where.offset]
        return slice(start, start + where.nbytes)

    def parts(self, where: ChunkRange) -> Iterator[tuple[ShardPiece, slice, slice]]:
        """Yield the pieces of a range; by elements, where each lies in it, and what of it does."""
        size, at = where.dtype.itemsize, max(bisect_right(self._starts, where.offset) - 1, 0)
        while at < len(self.pieces) and self._starts[at] < where.end:
            piece, at = self.pieces[at], at + 1
            start, end = max(piece.offset, where.offset), min(piece.end, where.end)
            if start < end:
                of_range = slice((start - where.offset) // size, (end - where.offset) // size)
                of_piece = slice((start - piece.offset) // size, (end - piece.offset) // size)
                yield piece, of_range, of_piece

    def split(self, change: Change) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield the tensors that a change touches, each with its part of the change."""
        size = change.dtype.itemsize
        first, last = (change.first + int(change.indices[at]) for at in (0, -1))
        where = ChunkRange(
            offset=first * size, nbytes=(last + 1 - first) * size, dtype=change.dtype
        )
        specs = [each.spec for each, _, _ in self.parts(where) if each.dtype is change.dtype]
        starts = change.bounds([each.offset // size for each in specs])
        ends = change.bounds([(each.offset + each.nbytes) // size for each in specs])
        if (ends - starts).sum() != len(change.indices):
            raise chunk_invalid("a chunk changes bytes that belong to no tensor")
        for spec, start, stop in zip(specs, starts.tolist(), ends.tolist(), strict=True):
            if start < stop:
                yield spec, slice(start, stop)

    def check_pieces(self, headers: Sequence[ChunkHeader]) -> None:
        """Refuse checked headers, by offset, that overlap or leave out a part of a tensor."""
        tensors = [spec for spec in self.layout.tensors if spec.nbytes]
        end, at = 0, 0
        for header in headers:
            if header.offset < end:
                raise chunk_invalid("chunks of shards overlap")
            while at < len(tensors) and tensors[at].offset + tensors[at].nbytes <= end:
                at += 1
            needed = max(end, tensors[at].offset) if at < len(tensors) else header.offset
            if header.offset > needed:
                break
            end = header.end
        last = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
        if end < last:
            raise chunk_invalid(f"the patches of the shards say nothing about byte {end}")

    def check_padding(self, flat: np.ndarray) -> None:
        """Refuse a flat state (u8[nbytes]) with anything but zeros between tensors."""
        end = 0
        for offset, nbytes in (
            *((s.offset, s.nbytes) for s in self.layout.tensors),
            (len(flat), 0),
        ):
            if flat[end:offset].any():
                raise chunk_invalid(f"bytes {end} to {offset} belong to no tensor, not zero")
            end = offset + nbytes
