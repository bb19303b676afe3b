"""Frequency tables: how often each symbol occurs, in 4,096ths, and their bytes.

    u16  symbol_count           highest symbol that occurs, plus one; 0: none does
    per symbol: its frequency; one byte below 128, else two: 128 + the high 7 bits, the low 8

Frequencies sum to 4,096.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

_TOTAL: Final = 4096
_SYMBOLS: Final = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class FrequencyTables:
    """Tables of one use; a symbol without frequency cannot be coded.

    Attributes:
        frequencies: u16[tables, 256]; a row sums to 4,096, or to 0 where the table is empty.
    """

    frequencies: np.ndarray

    @classmethod
    def of(cls, histograms: np.ndarray) -> "FrequencyTables":
        """Make tables from counts: i64[tables, 256]."""
        return cls(frequencies=np.stack([normalised(each) for each in histograms]))

    @cached_property
    def starts(self) -> np.ndarray:
        """u16[tables, 256]: the first slot of each symbol."""
        return (np.cumsum(self.frequencies, 1) - self.frequencies).astype(np.uint16)

    @cached_property
    def slots(self) -> np.ndarray:
        """u32[tables, 4096]: symbol | frequency - 1 << 8 | slot - start << 20; 0 where empty."""
        return np.stack([_slots(each) for each in self.frequencies])

    def to_bytes(self) -> bytes:
        """Return all tables, one after the other."""
        return b"".join(_table_bytes(each) for each in self.frequencies)


def normalised(histogram: np.ndarray) -> np.ndarray:
    """Return frequencies, u16[256], of counts, i64[256], in integer arithmetic.

    Each is the count's share of 4,096 rounded down, at least 1 where the count is; what is
    missing is given to the most frequent symbol, and what is too much taken from it, one by one
    (of equals, the lowest).
    """
    total = int(histogram.sum())
    if not total:
        return np.zeros(_SYMBOLS, np.uint16)
    shares = histogram * _TOTAL // total
    shares[(shares == 0) & (histogram > 0)] = 1
    excess = int(shares.sum()) - _TOTAL
    if excess <= 0:
        shares[shares.argmax()] -= excess
    for _ in range(excess):
        shares[shares.argmax()] -= 1
    return shares.astype(np.uint16)


def cost_bits(histogram: np.ndarray, frequencies: np.ndarray) -> int:
    """Return about what symbols cost, in bits, rounded by an integer rule: the same everywhere."""
    return (
        sum(
            int(histogram[symbol]) * (12 * 256 - _LOG2[int(frequencies[symbol])])
            for symbol in np.flatnonzero(histogram)
        )
        // 256
    )


def read_tables(data: memoryview, count: int) -> tuple[FrequencyTables, int]:
    """Read tables, and return how many bytes they took.

    Raises:
        ValueError: They are cut off, or do not sum to 4,096.
    """
    at, rows = 0, np.zeros((count, _SYMBOLS), np.uint16)
    for row in rows:
        at = _read_table(data, at, row)
    return FrequencyTables(frequencies=rows), at


def _read_table(data: memoryview, at: int, row: np.ndarray) -> int:
    try:
        (symbol_count,) = struct.unpack_from("<H", data, at)
        if symbol_count > _SYMBOLS:
            raise ValueError("has a table of more than 256 symbols")
        at += 2
        for symbol in range(symbol_count):
            value = data[at]
            at += 1
            if value >= 128:
                value = (value - 128) << 8 | data[at]
                at += 1
            row[symbol] = value
    except (struct.error, IndexError):
        raise ValueError("has a table that is cut off") from None
    if symbol_count and (int(row.sum(dtype=np.int64)) != _TOTAL or not row[symbol_count - 1]):
        raise ValueError("has a table that does not sum to 4096")
    return at


def _table_bytes(frequencies: np.ndarray) -> bytes:
    values: Sequence[int] = np.trim_zeros(frequencies, "b").tolist()
    body = (bytes((v,)) if v < 128 else bytes((128 | v >> 8, v & 255)) for v in values)
    return struct.pack("<H", len(values)) + b"".join(body)


def _slots(frequencies: np.ndarray) -> np.ndarray:
    wide = frequencies.astype(np.uint32)
    if not wide.any():
        return np.zeros(_TOTAL, np.uint32)
    symbols = np.repeat(np.arange(_SYMBOLS, dtype=np.uint32), wide)
    starts = np.repeat(np.cumsum(wide, dtype=np.uint32) - wide, wide)
    bias = np.arange(_TOTAL, dtype=np.uint32) - starts
    return symbols | (wide[symbols] - 1) << 8 | bias << 20


# 256 * log2 of each frequency, rounded down, in integers: f^256 has so many bits.
_LOG2: Final = (0, *((f**256).bit_length() - 1 for f in range(1, _TOTAL + 1)))
