"""Changes: what a patch does to the flat state, as absolute new bits beside the old ones."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from astraflow.codec import kernels
from astraflow.core.dtype import Dtype

_FAR: Final = 2**32 - 1


class Found(NamedTuple):
    """Elements of a range that change.

    Attributes:
        indices: u32[n], rising: see `Change`.
        before: uN[n], the bits that they had.
        values: uN[n], the bits that they get.
        sums: See `Change`.
    """

    indices: np.ndarray
    before: np.ndarray
    values: np.ndarray
    sums: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Elements of the flat state that change, and what they were before.

    Positions are byte offsets divided by the element size.

    Attributes:
        dtype: Of the elements.
        first: Position of the first element of their range.
        indices: u32[n], rising: positions less `first`.
        before: uN[n], the bits that they had.
        values: uN[n], the bits that they get.
        sums: What that adds to both sums of the state digest, where decoding found it by the way.
    """

    dtype: Dtype
    first: int
    indices: np.ndarray
    before: np.ndarray
    values: np.ndarray
    sums: tuple[int, int] | None = None

    @property
    def positions(self) -> np.ndarray:
        """Return a new array with their positions: i64[n], rising."""
        return self.indices.astype(np.int64) + self.first

    def bounds(self, positions: ArrayLike) -> np.ndarray:
        """Return how many changes are before each of some positions: i64[n]."""
        wanted = np.clip(np.asarray(positions, np.int64) - self.first, 0, _FAR)
        # Of the type of the indices: another one would have all of them converted.
        return np.searchsorted(self.indices, wanted.astype(np.uint32))

    def between(self, start: int, end: int) -> tuple[np.ndarray, slice]:
        """Return the changes in a part of the state: i64[n] from `start`, and which they are."""
        low, high = self.bounds((start, end)).tolist()
        indices = self.indices[low:high].astype(np.int64)
        indices += self.first - start
        return indices, slice(low, high)

    def apply(self, flat: np.ndarray) -> None:
        """Write the new bits into a state: u8[nbytes]. Doing so twice is harmless."""
        itemsize = self.dtype.itemsize
        whole = len(flat) // itemsize * itemsize
        bits = flat[self.first * itemsize : whole].view(self.dtype.bits)
        if kernels.level() < 0:
            bits[self.indices] = self.values
        else:
            kernels.loops.scatter(bits, self.indices, self.values, itemsize)
