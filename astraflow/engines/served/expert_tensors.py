"""Experts: trained as one tensor for all of a layer, kept in checkpoints as one for each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from astraflow.core.tensors import TensorSpec, TensorUpdate, WeightUpdate

Shapes = Mapping[str, tuple[int, ...]]

# What the stacked tensors hold of each expert, one behind the other.
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def apart(update: WeightUpdate, shapes: Shapes) -> WeightUpdate:
    """Return an update with the tensors of a checkpoint: what is stacked in it is cut apart.

    A server's loader knows the names of the checkpoint. An expert's share of a stack is one
    stretch, so nothing is copied but the indices of what changed.

    Args:
        update: With `...experts.gate_up_proj`, [E, 2 I, H], and `...experts.down_proj`, [E, H, I],
            as transformers has them.
        shapes: Of the checkpoint; what it has no names for stays as it is.
    """
    pieces = [piece for part in update.tensors for piece in _pieces(part, shapes)]
    return replace(update, tensors=tuple(pieces))


def _pieces(part: TensorUpdate, shapes: Shapes) -> Iterator[TensorUpdate]:
    names = _names(part.spec, shapes)
    if not names:
        yield part
        return
    width = part.spec.element_count // len(names)
    starts = np.arange(len(names) + 1) * width
    bounds = starts if part.indices is None else np.searchsorted(part.indices, starts)
    for name, start, first, last in zip(names, starts, bounds, bounds[1:], strict=False):
        if first == last:
            continue
        yield TensorUpdate(
            spec=TensorSpec(name=name, dtype=part.spec.dtype, shape=shapes[name], offset=0),
            indices=None if part.indices is None else part.indices[first:last] - start,
            values=part.values[first:last],
        )


def _names(spec: TensorSpec, shapes: Shapes) -> Sequence[str]:
    """Return the names of what a stack holds, in its order; none: it is no stack here."""
    prefix, _, stack = spec.name.rpartition(".experts.")
    if not prefix or spec.name in shapes or stack not in _STACKS:
        return ()
    names = [
        f"{prefix}.experts.{expert}.{each}.weight"
        for expert in range(spec.shape[0])
        for each in _STACKS[stack]
    ]
    return names if all(name in shapes for name in names) else ()
