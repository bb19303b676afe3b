"""Tokens: numbers as a symbol of few values, which is entropy coded, and low bits, which are not.

0 to 7 are their own token. A larger number of which bit `top` is the highest has the token
`8 + 4 * (top - 3) + the two bits below it`, and `top - 2` low bits. 300 = 0b100101100 has top 8,
token 8 + 20 + 0 = 28, and the low bits 0b101100. Low bits are one stream, lowest bit first.
"""

from typing import Final

import numpy as np

MAX_TOKEN: Final = 251
"""Of a number of 64 bits."""


def tokens_of(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens u8[n] and how many low bits each number (u64[n]) has: i64[n]."""
    top = _highest_bit(numbers)
    is_small = numbers < 8
    widths = np.where(is_small, 0, top - 2)
    second = (numbers >> np.maximum(top - 2, 0).astype(np.uint64)).astype(np.int64) & 3
    tokens = np.where(is_small, numbers.astype(np.int64), 8 + 4 * (top - 3) + second)
    return tokens.astype(np.uint8), widths


def pack_low_bits(numbers: np.ndarray, widths: np.ndarray) -> bytes:
    """Return the low bits of numbers, u64[n], one after the other."""
    starts = np.cumsum(widths) - widths
    place = np.arange(int(widths.sum())) - np.repeat(starts, widths)
    bits = (np.repeat(numbers, widths) >> place.astype(np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def numbers_of(tokens: np.ndarray, low_bits: bytes) -> np.ndarray:
    """Return the numbers, u64[n], of tokens u8[n].

    Raises:
        ValueError: There are more or fewer low bits than the tokens need.
    """
    wide = tokens.astype(np.int64)
    is_small = wide < 8
    widths = np.where(is_small, 0, (wide - 8) // 4 + 1)
    bit_count = int(widths.sum())
    if (wide > MAX_TOKEN).any() or (bit_count + 7) // 8 != len(low_bits):
        raise ValueError("has another number of bits than its tokens need")
    bits = np.unpackbits(np.frombuffer(low_bits, np.uint8), bitorder="little")
    if bits[bit_count:].any():
        raise ValueError("has another number of bits than its tokens need")
    base = (4 + (wide & 3)).astype(np.uint64) << widths.astype(np.uint64)
    low = _low_bits(bits[:bit_count], widths)
    return np.where(is_small, wide.astype(np.uint64), base + low)


def _low_bits(bits: np.ndarray, widths: np.ndarray) -> np.ndarray:
    starts = np.cumsum(widths) - widths
    place = np.arange(len(bits)) - np.repeat(starts, widths)
    values = np.zeros(len(widths) + 1, np.uint64)
    has_bits = np.flatnonzero(widths)
    if len(has_bits):
        worth = bits.astype(np.uint64) << place.astype(np.uint64)
        values[has_bits] = np.add.reduceat(worth, starts[has_bits])
    return values[:-1]


def _highest_bit(numbers: np.ndarray) -> np.ndarray:
    top = np.zeros(len(numbers), np.int64)
    rest = numbers.copy()
    for step in (32, 16, 8, 4, 2, 1):
        is_above = rest >> np.uint64(step) != 0
        top += step * is_above
        rest >>= (step * is_above).astype(np.uint64)
    return top
