"""Tensor updates: what a new flat state asks of an engine."""

from collections.abc import Iterable, Mapping

import numpy as np

from astraflow.codec.changes import Change
from astraflow.core.layout import Layout
from astraflow.core.updates import TensorUpdate
from astraflow.weights.frame import Frame


def changed_indices(frame: Frame, changes: Iterable[Change]) -> Mapping[str, np.ndarray]:
    """Return which elements of which tensors change.

    Args:
        frame: Of the state.
        changes: Of one or several patches; one element may change more than once.

    Returns:
        By name of the tensor: i64[n], rising.

    Raises:
        AstraflowError: CHUNK_INVALID when a change lies between tensors.
    """
    pieces: dict[str, list[np.ndarray]] = {}
    for change in changes:
        for spec, part in frame.split(change):
            indices = change.positions[part] - spec.offset // spec.dtype.itemsize
            pieces.setdefault(spec.name, []).append(indices)
    return {name: _joined(parts) for name, parts in pieces.items()}


def sparse_updates(
    layout: Layout, flat: np.ndarray, indices: Mapping[str, np.ndarray]
) -> tuple[TensorUpdate, ...]:
    """Return the new bits of some elements; a tensor of which most changed comes whole.

    Args:
        layout: Of the state.
        flat: u8[nbytes], after the changes.
        indices: By name of the tensor.
    """
    updates: list[TensorUpdate] = []
    for spec in layout.tensors:
        chosen = indices.get(spec.name)
        if chosen is None:
            continue
        bits = layout.view(flat, spec.name).reshape(-1)
        if 2 * len(chosen) > len(bits):
            updates.append(TensorUpdate(spec=spec, indices=None, values=bits.copy()))
        else:
            updates.append(TensorUpdate(spec=spec, indices=chosen, values=bits[chosen]))
    return tuple(updates)


def dense_updates(layout: Layout, flat: np.ndarray) -> tuple[TensorUpdate, ...]:
    """Return every tensor whole.

    The values are copies: the state moves on in place, and an engine may keep what it got.
    """
    return tuple(
        TensorUpdate(
            spec=spec, indices=None, values=layout.view(flat, spec.name).reshape(-1).copy()
        )
        for spec in layout.tensors
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts)
    return joined if (joined[1:] > joined[:-1]).all() else np.unique(joined)
