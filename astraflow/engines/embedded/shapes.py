"""Shapes under which a row's result does not depend on its neighbours.

Measured with torch 2.13 on one CPU thread (MKL, AVX-512):

- A linear layer in f32 gives a row the same bits for every row count from 16 up, and other
  bits below: at least 16 rows are computed. With oneDNN, where `engines.modules` takes it, from
  2 rows up.
- Masked attention gives the same bits for every key length that is a multiple of 16, as the
  masked tail adds exact zeros to whole vectors: lengths are multiples of 16, and prompts are
  padded on the right to a length that depends on nothing but their own.
- An elementwise function goes over the whole tensor 32 elements at a time, and takes what is
  left over with another exp, an ulp away: rows times width is a multiple of 32.
"""

from collections.abc import Iterable
from math import gcd

MIN_ROWS = 16
_ELEMENTS_AT_ONCE = 32
_FINE_STEP = 16
_COARSE_STEP = 64
_FINE_END = 128


def row_step(widths: Iterable[int]) -> int:
    """Return what the number of rows must be a multiple of, for elementwise work of these widths.

    Example:
        >>> row_step([96, 288, 32]), row_step([96, 48, 16])
        (1, 2)
    """
    return _ELEMENTS_AT_ONCE // gcd(_ELEMENTS_AT_ONCE, *widths)


def padded_rows(row_count: int, *, step: int) -> int:
    """Return how many rows to compute for so many, a multiple of `step`."""
    return -(-max(row_count, MIN_ROWS) // step) * step


def padded_length(length: int) -> int:
    """Return the length to which a prompt or a view of the cache is rounded up.

    Example:
        >>> [padded_length(n) for n in (1, 16, 17, 128, 129)]
        [16, 16, 32, 128, 192]
    """
    step = _FINE_STEP if length <= _FINE_END else _COARSE_STEP
    return -(-length // step) * step


def coarse_length(length: int, *, limit: int) -> int:
    """Return the length to which a GPU pads prompts: few passes cost less than few tokens.

    Args:
        length: Padded.
        limit: Of the cache, which may be less than twice as long.

    Example:
        >>> [coarse_length(n, limit=768) for n in (16, 64, 80, 192, 576)]
        [64, 64, 128, 256, 768]
    """
    return min(max(_COARSE_STEP, 1 << (length - 1).bit_length()), limit)


def grown(capacity: int, *, needed: int, limit: int) -> int:
    """Return a capacity of at least `needed`, doubled until it suffices, at most `limit`."""
    while capacity < needed:
        capacity *= 2
    return max(min(capacity, limit), needed)
