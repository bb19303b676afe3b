"""Parts: what of a layout one rank of a trainer publishes."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkRange, Runs
from astraflow.core.tensors import Dtype, Layout, TensorSpec


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
class ShardPiece:
    """Rows of one tensor.

    Attributes:
        first: Element of the tensor that it begins with.
        offset: Of that element in the layout, in bytes.
    """

    spec: TensorSpec
    first: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def dtype(self) -> Dtype:
        return self.spec.dtype


class ShardLayout(Runs):
    """A shard's part of a layout: its pieces, how they are cut, and where they lie in memory.

    The whole layout is cut as `Runs` cuts it. Of a shard every piece is cut for itself, every
    4 MiB, and the pieces lie in memory one behind the other, each on a 64-byte boundary.

    Attributes:
        pieces: By offset; those without bytes are left out.
        nbytes: Of the part in memory.
        payload_nbytes: Of all its ranges.
    """

    def __init__(self, layout: Layout, shard: Shard = WHOLE) -> None:
        super().__init__(layout)
        self.layout = layout
        self.shard = shard
        self.pieces = tuple(_pieces(layout, shard))
        self._starts = [piece.offset for piece in self.pieces]
        self._places: dict[int, int] = {}
        self.payload_nbytes = sum(where.nbytes for where in self.ranges())
        end = 0
        for where in self.ranges():
            self._places[where.offset] = where.offset if shard.count == 1 else end
            end += -(-where.nbytes // 64) * 64
        self.nbytes = layout.nbytes if shard.count == 1 else end

    def ranges(self) -> Iterator[ChunkRange]:
        if self.shard.count == 1:
            yield from super().ranges()
            return
        for piece in self.pieces:
            for offset in range(piece.offset, piece.end, CHUNK_NBYTES):
                nbytes = min(CHUNK_NBYTES, piece.end - offset)
                yield ChunkRange(offset=offset, nbytes=nbytes, dtype=piece.dtype)

    def place(self, where: ChunkRange) -> slice:
        """Return where a range, one of `ranges()`, lies in memory."""
        start = self._places[where.offset]
        return slice(start, start + where.nbytes)

    def touching(self, where: ChunkRange) -> Iterator[ShardPiece]:
        """Yield the pieces that lie in a range, at least in part."""
        at = max(bisect_right(self._starts, where.offset) - 1, 0)
        while at < len(self.pieces) and self._starts[at] < where.end:
            if self.pieces[at].end > where.offset:
                yield self.pieces[at]
            at += 1


def _pieces(layout: Layout, shard: Shard) -> Iterator[ShardPiece]:
    for spec in layout.tensors:
        rows = shard.rows(spec)
        row_count = spec.shape[0] if spec.shape else 1
        if not spec.nbytes or not rows:
            continue
        row_nbytes = spec.nbytes // row_count
        yield ShardPiece(
            spec=spec,
            first=rows.start * row_nbytes // spec.dtype.itemsize,
            offset=spec.offset + rows.start * row_nbytes,
            nbytes=len(rows) * row_nbytes,
        )
