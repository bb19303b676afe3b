"""Weight updates: what a verified version asks of an engine."""

from dataclasses import dataclass

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.layout import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorUpdate:
    """New bits of one tensor: all of them, or those of some elements.

    Absolute values, so applying an update twice is harmless.

    Attributes:
        spec: The tensor.
        indices: i64[n] of the flattened tensor, rising; None: every element.
        values: Bits (unsigned integers of the element size), [n] or [element_count].
    """

    spec: TensorSpec
    indices: np.ndarray | None
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """What turns the live weights of a policy into a version.

    Attributes:
        policy_id: Whose weights.
        version: What they are afterwards.
        base_version: What they must be before; None: anything, all tensors are dense.
        tensors: Only those that change.
    """

    policy_id: PolicyId
    version: int
    base_version: int | None
    tensors: tuple[TensorUpdate, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """How a swap went.

    Attributes:
        version: Now live.
        pause_s: Seconds in which the engine decoded nothing for the swap.
        inflight_count: Generations that went on across it.
    """

    version: int
    pause_s: float
    inflight_count: int
