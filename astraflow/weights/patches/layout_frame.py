"""Frames: a layout with all that is derived from it, and the flat states that fit into it.

Changes and chunks that do not fit are CHUNK_INVALID.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import ChunkHeader, Runs
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout, TensorSpec
from astraflow.wire.weights import layout_digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Column:
    """The tensors of one dtype, by position: starts i64[n], ends i64[n]."""

    specs: tuple[TensorSpec, ...]
    starts: np.ndarray
    ends: np.ndarray


class LayoutFrame:
    """What publisher and puller both need of a layout: its digest, and how it is cut (`runs`)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.digest = layout_digest(layout)
        self.runs = Runs(layout)
        self._columns = {dtype: _column(layout, dtype) for dtype in Dtype}

    def split(self, change: Change) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield the tensors that a change touches, each with its part of the change."""
        column = self._columns[change.dtype]
        first = max(_place(column.starts, change.first + int(change.indices[0])) - 1, 0)
        end = _place(column.starts, change.first + int(change.indices[-1]))
        starts: list[int] = change.bounds(column.starts[first:end]).tolist()
        ends: list[int] = change.bounds(column.ends[first:end]).tolist()
        if sum(ends) - sum(starts) != len(change.indices):
            raise AstraflowError(
                Reason.CHUNK_INVALID, "a chunk changes bytes that belong to no tensor"
            )
        for number, (start, stop) in enumerate(zip(starts, ends, strict=True), first):
            if start < stop:
                yield column.specs[number], slice(start, stop)

    def check_pieces(self, headers: Sequence[ChunkHeader]) -> None:
        """Refuse checked headers, by offset, that overlap or leave out a part of a tensor."""
        tensors = [spec for spec in self.layout.tensors if spec.nbytes]
        end, at = 0, 0
        for header in headers:
            if header.offset < end:
                raise AstraflowError(Reason.CHUNK_INVALID, "chunks of shards overlap")
            while at < len(tensors) and tensors[at].offset + tensors[at].nbytes <= end:
                at += 1
            needed = max(end, tensors[at].offset) if at < len(tensors) else header.offset
            if header.offset > needed:
                break
            end = header.end
        last = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
        if end < last:
            raise AstraflowError(
                Reason.CHUNK_INVALID, f"the patches of the shards say nothing about byte {end}"
            )

    def check_padding(self, flat: np.ndarray) -> None:
        """Refuse a flat state (u8[nbytes]) with anything but zeros between tensors."""
        end = 0
        for offset, nbytes in (
            *((s.offset, s.nbytes) for s in self.layout.tensors),
            (len(flat), 0),
        ):
            if flat[end:offset].any():
                raise AstraflowError(
                    Reason.CHUNK_INVALID, f"bytes {end} to {offset} belong to no tensor, not zero"
                )
            end = offset + nbytes


def _column(layout: Layout, dtype: Dtype) -> _Column:
    specs = tuple(spec for spec in layout.tensors if spec.dtype is dtype and spec.nbytes)
    starts = np.array([spec.offset // dtype.itemsize for spec in specs], np.int64)
    counts = np.array([spec.element_count for spec in specs], np.int64)
    return _Column(specs=specs, starts=starts, ends=starts + counts)


def _place(starts: np.ndarray, position: int) -> int:
    """Return how many starts are at the position or before it."""
    return int(np.searchsorted(starts, position, "right"))
