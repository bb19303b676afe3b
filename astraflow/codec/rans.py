"""rANS with several lanes: symbols become 16-bit words at nearly the entropy of their tables.

After Duda, Asymmetric numeral systems (2013), in the byte-wise form of Giesen, Interleaved
entropy coders (2014). Symbol i belongs to lane `i mod lanes`. A lane's state lies in
[2^16, 2^32), frequencies sum to 2^12. Decoding a symbol s of frequency f that starts at c:

    slot  = state mod 4096                     s is the symbol with c <= slot < c + f
    state = f * (state >> 12) + slot - c
    if state < 2^16: state = state << 16 | the next word

Encoding does the reverse, last symbol first, and starts each lane at 2^16, where decoding ends.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from astraflow.codec import kernels
from astraflow.codec.tables import FrequencyTables

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
