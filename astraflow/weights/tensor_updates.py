"""Tensor updates: what a new flat state asks of an engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from astraflow.codec.changes import Change
from astraflow.core.layout import Layout
from astraflow.core.updates import TensorUpdate
from astraflow.weights.frame import Frame


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touched:
    """Elements of one tensor that change.

    Attributes:
        indices: i64[n], rising.
        values: uN[n], the bits that they get; None: an element changes more than once.
    """

    indices: np.ndarray
    values: np.ndarray | None


def touched_elements(frame: Frame, changes: Iterable[Change]) -> Mapping[str, Touched]:
    """Return which elements of which tensors change, by name of the tensor.

    Args:
        frame: Of the state.
        changes: Of one or several patches; one element may change more than once.

    Raises:
        AstraflowError: CHUNK_INVALID when a change lies between tensors.
    """
    pieces: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for change in changes:
        for spec, part in frame.split(change):
            indices = change.indices[part].astype(np.int64)
            indices += change.first - spec.offset // spec.dtype.itemsize
            pieces.setdefault(spec.name, []).append((indices, change.values[part]))
    return {name: _joined(parts) for name, parts in pieces.items()}


def is_told_by(layout: Layout, touched: Mapping[str, Touched]) -> bool:
    """Whether `sparse_updates` needs nothing of the state but what changes."""
    return all(
        each.values is not None and not _is_most(each, layout.by_name[name].element_count)
        for name, each in touched.items()
    )


def sparse_updates(
    layout: Layout, flat: np.ndarray, touched: Mapping[str, Touched]
) -> tuple[TensorUpdate, ...]:
    """Return the new bits of some elements; a tensor of which most changed comes whole.

    Args:
        layout: Of the state.
        flat: u8[nbytes], after the changes.
        touched: By name of the tensor.
    """
    updates: list[TensorUpdate] = []
    for spec in layout.tensors:
        found = touched.get(spec.name)
        if found is None:
            continue
        bits = layout.view(flat, spec.name).reshape(-1)
        if _is_most(found, len(bits)):
            updates.append(TensorUpdate(spec=spec, indices=None, values=bits.copy()))
        else:
            values = bits[found.indices] if found.values is None else found.values
            updates.append(TensorUpdate(spec=spec, indices=found.indices, values=values))
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


def _is_most(touched: Touched, element_count: int) -> bool:
    return 2 * len(touched.indices) > element_count


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> Touched:
    if len(parts) == 1:
        return Touched(indices=parts[0][0], values=parts[0][1])
    indices = np.concatenate([each for each, _ in parts])
    if (indices[1:] > indices[:-1]).all():
        return Touched(indices=indices, values=np.concatenate([each for _, each in parts]))
    return Touched(indices=np.unique(indices), values=None)
