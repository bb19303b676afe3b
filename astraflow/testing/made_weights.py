"""Weights that a trainer without a model publishes: numbers that say which version they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from astraflow.core.dtype import Dtype
from astraflow.core.layout import Layout

_SIZE = 100


def _one_tensor() -> Layout:
    return Layout.of([("w", Dtype.F32, (_SIZE,))])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counting:
    """Version n is the tensor `w`, f32[100], filled with n."""

    layout: Layout = field(default_factory=_one_tensor)

    def of(self, version: int) -> Mapping[str, np.ndarray]:
        """Return the tensors of a version, as bits."""
        return {"w": np.full(_SIZE, version, np.float32).view(np.uint32)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flickering:
    """A model's own tensors; in odd versions the lowest bit of one element differs.

    Attributes:
        layout: Of the model.
        tensors: By name, as bits.
    """

    layout: Layout
    tensors: Mapping[str, np.ndarray]

    def of(self, version: int) -> Mapping[str, np.ndarray]:
        """Return the tensors of a version, as bits."""
        name, old = next(iter(self.tensors.items()))
        new = old.copy()
        new.reshape(-1)[:1] ^= version % 2
        return {**self.tensors, name: new}
