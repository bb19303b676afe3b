"""Changes: what a patch does to the flat state, as absolute new bits beside the old ones.

Their arrays are cut from blocks that are used again. A patch changes a million elements for each
two gigabytes of weights, and what is known of each takes eight bytes and more. Memory that is fresh
from the system costs as much time as a quarter of the decoding. So a block whose last array is gone
is kept for the next patch, up to 16 MiB of them.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from astraflow.codec import kernels
from astraflow.core.tensors import Dtype

_FAR: Final = 2**32 - 1


class FoundChanges(NamedTuple):
    """Elements of a range that change, as the fields of a `Change` of the same names."""

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


_BLOCK_NBYTES: Final = 512 << 10
_LEAST_NBYTES: Final = 64 << 10
_MOST_IDLE: Final = 32
_LINE: Final = 64

_idle: list[memoryview] = []


class _Block(threading.local):
    """What is left of the newest block of a thread."""

    rest: np.ndarray = np.empty(0, np.uint8)


_block = _Block()


def empty_changes(
    count: int, bits: np.dtype[np.unsignedinteger]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays for indices (u32[count]), old and new bits (uN[count]); they hold anything."""
    sizes = (4 * count, bits.itemsize * count, bits.itemsize * count)
    second = sizes[0] + -sizes[0] % _LINE
    third = second + sizes[1] + -sizes[1] % _LINE
    room = _take(third + sizes[2] + -sizes[2] % _LINE)
    return (
        room[: sizes[0]].view(np.uint32),
        room[second : second + sizes[1]].view(bits),
        room[third : third + sizes[2]].view(bits),
    )


def _take(nbytes: int) -> np.ndarray:
    if not _LEAST_NBYTES <= nbytes <= _BLOCK_NBYTES:
        return np.empty(nbytes, np.uint8)
    if nbytes > len(_block.rest):
        try:
            pages = _idle.pop()
        except IndexError:
            pages = np.empty(_BLOCK_NBYTES, np.uint8).data
        # Arrays that are cut from it hold on to this one: it goes when the last of them is gone.
        _block.rest = np.frombuffer(pages, np.uint8)
        weakref.finalize(_block.rest, _keep, pages).atexit = False
    taken, _block.rest = _block.rest[:nbytes], _block.rest[nbytes:]
    return taken


def _keep(pages: memoryview) -> None:
    if len(_idle) < _MOST_IDLE:
        _idle.append(pages)
