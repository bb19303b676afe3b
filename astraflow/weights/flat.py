"""Flat states: a version as one array of bytes, and what differs between two of them."""

from collections.abc import Iterable, Iterator

import numpy as np

from astraflow.codec.chunks import ranges_of
from astraflow.codec.decode import Change
from astraflow.core.dtype import Dtype
from astraflow.core.layout import Layout, TensorSpec
from astraflow.core.updates import TensorUpdate


def elements(flat: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Return a flat state (u8[nbytes]) seen as elements (uN[nbytes / size]): no copy.

    A layout ends on a 64-byte boundary, so every element size divides it.
    """
    return flat.view(dtype.bits)


def changes_between(layout: Layout, old: np.ndarray, new: np.ndarray) -> Iterator[Change]:
    """Yield what differs between two flat states, a range at a time."""
    for where in ranges_of(layout):
        first = where.offset // where.dtype.itemsize
        part = slice(first, first + where.nbytes // where.dtype.itemsize)
        bits = elements(new, where.dtype)[part]
        indices = np.flatnonzero(bits != elements(old, where.dtype)[part])
        if len(indices):
            yield Change(dtype=where.dtype, positions=indices + first, values=bits[indices])


def tensor_updates(
    layout: Layout, flat: np.ndarray, changes: Iterable[Change]
) -> tuple[TensorUpdate, ...]:
    """Return what changes ask of each tensor, with the values of the state that they led to.

    Args:
        layout: Of the state.
        flat: u8[nbytes], after the changes.
        changes: Of one or of several patches; the same element may come more than once.
    """
    positions: dict[Dtype, list[np.ndarray]] = {}
    for change in changes:
        positions.setdefault(change.dtype, []).append(change.positions)
    merged = {dtype: _merged(parts) for dtype, parts in positions.items()}
    updates = (
        _tensor_update(spec, flat, merged[spec.dtype])
        for spec in layout.tensors
        if spec.dtype in merged
    )
    return tuple(update for update in updates if len(update.values))


def _merged(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _tensor_update(spec: TensorSpec, flat: np.ndarray, positions: np.ndarray) -> TensorUpdate:
    first = spec.offset // spec.dtype.itemsize
    start, end = np.searchsorted(positions, (first, first + spec.element_count))
    indices = positions[start:end] - first
    bits = elements(flat, spec.dtype)[first : first + spec.element_count]
    return TensorUpdate(spec=spec, indices=indices, values=bits[indices])


def dense_updates(layout: Layout, flat: np.ndarray) -> tuple[TensorUpdate, ...]:
    """Return every tensor whole; the values are copies."""
    return tuple(
        TensorUpdate(
            spec=spec, indices=None, values=layout.view(flat, spec.name).reshape(-1).copy()
        )
        for spec in layout.tensors
    )
