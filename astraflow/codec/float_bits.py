"""Bits of floats: an order in which neighbours are one unit of the last place apart, and rounding.

The sign bit is flipped for positive numbers, all bits for negative ones. It is a bijection, so
NaNs and signed zeros survive bit by bit. Distances are taken modulo 2^N and folded: 0, -1, 1, -2
become 0, 1, 2, 3.
"""

import numpy as np

from astraflow.codec import kernels


def folded_distances(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return how far the new bits are from the old ones: uN[n] each."""
    return _fold(_ordered(new) - _ordered(old))


def moved(start: np.ndarray, folded: np.ndarray) -> np.ndarray:
    """Return the bits that are some folded distances from others: uN[n] each."""
    return _unordered(_ordered(start) + _unfold(folded))


def moved_back(end: np.ndarray, folded: np.ndarray) -> np.ndarray:
    """Return the bits from which some folded distances lead to others: uN[n] each."""
    return _unordered(_ordered(end) - _unfold(folded))


def _ordered(bits: np.ndarray) -> np.ndarray:
    top, sign = _top(bits.dtype)
    flips = np.negative(bits >> top)
    flips |= sign
    return bits ^ flips


def _unordered(ordered: np.ndarray) -> np.ndarray:
    top, sign = _top(ordered.dtype)
    flips = (ordered >> top) - ordered.dtype.type(1)
    flips |= sign
    return ordered ^ flips


def _top(dtype: np.dtype[np.unsignedinteger]) -> tuple[np.unsignedinteger, np.unsignedinteger]:
    """Return the place of the sign bit, and the bit."""
    place = 8 * dtype.itemsize - 1
    return dtype.type(place), dtype.type(1 << place)


def _fold(distance: np.ndarray) -> np.ndarray:
    top, _ = _top(distance.dtype)
    return (distance << distance.dtype.type(1)) ^ np.negative(distance >> top)


def _unfold(folded: np.ndarray) -> np.ndarray:
    one = folded.dtype.type(1)
    return (folded >> one) ^ np.negative(folded & one)


def round_bf16(values: np.ndarray, bits: np.ndarray) -> None:
    """Round to nearest, ties to even; not-a-number stays one.

    Few values are rounded without letting another thread have the interpreter meanwhile: waking
    it up, and waiting for it again, takes longer.

    Args:
        values: f32[n], contiguous.
        bits: u16[n], contiguous: where they go.
    """
    level = kernels.level()
    if level is not kernels.KernelLevel.NUMPY:
        kernels.loops.round_bf16(level, values, bits)
        return
    given = values.view(np.uint32)
    rounded = (given + 0x7FFF + (given >> 16 & 1)) >> 16
    bits[:] = np.where(np.isnan(values), given >> 16 | 0x40, rounded)
