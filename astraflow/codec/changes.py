"""Changes: what a patch does to the flat state, as absolute new bits beside the old ones."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from astraflow.codec import kernels
from astraflow.core.dtype import Dtype


class Found(NamedTuple):
    """Elements of a range that change.

    Attributes:
        positions: i64[n], rising: see `Change`.
        before: uN[n], the bits that they had.
        values: uN[n], the bits that they get.
        sums: See `Change`.
    """

    positions: np.ndarray
    before: np.ndarray
    values: np.ndarray
    sums: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Elements of the flat state that change, and what they were before.

    Attributes:
        dtype: Of the elements.
        positions: i64[n], rising: byte offset of each divided by the element size.
        before: uN[n], the bits that they had.
        values: uN[n], the bits that they get.
        sums: What that adds to both sums of the state digest, where decoding found it by the way.
    """

    dtype: Dtype
    positions: np.ndarray
    before: np.ndarray
    values: np.ndarray
    sums: tuple[int, int] | None = None

    def apply(self, flat: np.ndarray) -> None:
        """Write the new bits into a state: u8[nbytes]. Doing so twice is harmless."""
        itemsize = self.dtype.itemsize
        whole = len(flat) // itemsize * itemsize
        bits = flat[:whole].view(self.dtype.bits)
        if kernels.level() < 0:
            bits[self.positions] = self.values
        else:
            kernels.loops.scatter(bits, self.positions, self.values, itemsize)
