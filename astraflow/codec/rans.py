"""rANS with several lanes: symbols become 16-bit words at nearly the entropy of their tables.

After Duda, Asymmetric numeral systems (2013), in the byte-wise form of Giesen, Interleaved
entropy coders (2014). Symbol i belongs to lane `i mod lanes`. A lane's state lies in
[2^16, 2^32), frequencies sum to 2^12. Decoding a symbol s of frequency f that starts at c:

    slot  = state mod 4096                     s is the symbol with c <= slot < c + f
    state = f * (state >> 12) + slot - c
    if state < 2^16: state = state << 16 | the next word

Encoding does the reverse, last symbol first, and starts each lane at 2^16, where decoding ends.

Tables say how often each symbol occurs, in 4,096ths; their bytes:

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

from astraflow.codec import kernels

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
START: Final = 1 << 16
_PRECISION: Final = 12


def lane_count(symbol_count: int) -> int:
    """Return how many lanes so many symbols have: a power of two, 16 to 256, one per 8,192."""
    return min(256, max(16, 1 << max(0, (symbol_count >> 13).bit_length() - 1)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SymbolRuns:
    """Which table each symbol is coded with: runs of symbols.

    Attributes:
        counts: u32[n], symbols in each run.
        tables: u32[n], their table.
    """

    counts: np.ndarray
    tables: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, tables: np.ndarray) -> "SymbolRuns":
        """Leave out the runs without symbols."""
        has = np.flatnonzero(counts)
        return cls(counts=counts[has].astype(np.uint32), tables=tables[has].astype(np.uint32))

    @property
    def by_symbol(self) -> np.ndarray:
        """The table of each symbol: u32[symbols]."""
        return np.repeat(self.tables, self.counts)


def encode(
    symbols: np.ndarray, runs: SymbolRuns, tables: FrequencyTables
) -> tuple[bytes, bytes] | None:
    """Return states (u32 each) and words (u16 each), or None: a symbol has no frequency.

    Args:
        symbols: u8[n].
        runs: Which table each has.
        tables: All of them.
    """
    lanes = lane_count(len(symbols))
    level = kernels.level()
    if level < 0:
        return _encode(symbols, runs, tables, lanes)
    found = kernels.loops.rans_encode(
        level, symbols, runs.counts, runs.tables, tables.frequencies, tables.starts, lanes
    )
    return None if found[0] is None else found


def decode(
    states: memoryview, words: memoryview, runs: SymbolRuns, tables: FrequencyTables
) -> np.ndarray:
    """Return the symbols, u8[n].

    Args:
        states: u32[lanes].
        words: u16[n].
        runs: Which table each symbol has, and so how many there are.
        tables: All of them.

    Raises:
        ValueError: What is wrong with states and words.
    """
    level = kernels.level()
    if level < 0:
        return _decode(states, words, runs, tables)
    symbols = np.empty(int(runs.counts.sum()), np.uint8)
    kernels.loops.rans_decode(level, states, words, runs.counts, runs.tables, tables.slots, symbols)
    return symbols


def _encode(
    symbols: np.ndarray, runs: SymbolRuns, tables: FrequencyTables, lanes: int
) -> tuple[bytes, bytes] | None:
    which = runs.by_symbol
    frequencies = tables.frequencies[which, symbols].astype(np.uint64)
    starts = tables.starts[which, symbols].astype(np.uint64)
    if not frequencies.all():
        return None
    state = np.full(lanes, START, np.uint64)
    words: list[np.ndarray] = []
    for first in reversed(range(0, len(symbols), lanes)):
        f, c = frequencies[first : first + lanes], starts[first : first + lanes]
        x = state[: len(f)]
        due = x >= f << np.uint64(32 - _PRECISION)
        words.append(x[due].astype("<u2"))
        x = np.where(due, x >> np.uint64(16), x)
        state[: len(f)] = (x // f << np.uint64(_PRECISION)) + x % f + c
    return state.astype("<u4").tobytes(), b"".join(each.tobytes() for each in reversed(words))


def _decode(
    states: memoryview, words: memoryview, runs: SymbolRuns, tables: FrequencyTables
) -> np.ndarray:
    which = runs.by_symbol.astype(np.int64) * 4096
    state = np.frombuffer(states, "<u4").astype(np.uint64)
    stream = np.frombuffer(words, "<u2").astype(np.uint64)
    symbols = np.empty(len(which), np.uint8)
    slots, at = tables.slots.reshape(-1), 0
    for first in range(0, len(which), len(state)):
        part = which[first : first + len(state)]
        x = state[: len(part)]
        entry = slots[part + (x & np.uint64(4095)).astype(np.int64)].astype(np.uint64)
        symbols[first : first + len(part)] = entry & np.uint64(255)
        frequency = (entry >> np.uint64(8) & np.uint64(4095)) + np.uint64(1)
        x = frequency * (x >> np.uint64(_PRECISION)) + (entry >> np.uint64(20))
        due = np.flatnonzero(x < START)
        if at + len(due) > len(stream):
            raise ValueError("ends before its last symbol")
        x[due] = x[due] << np.uint64(16) | stream[at : at + len(due)]
        at += len(due)
        state[: len(part)] = x
    if (state != START).any():
        raise ValueError("does not end where it began")
    if at != len(stream):
        raise ValueError("has bytes behind its last symbol")
    return symbols
