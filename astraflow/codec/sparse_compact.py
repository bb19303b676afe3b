"""SPARSE_COMPACT: gaps counted within the class of the base's exponent, entropy coded.

Payload:

    LEB128  counts[class_count]   changes in each class
    u32     word_count
    u32     states[lanes]         lanes: see `rans.lane_count`, for two symbols per change
    u16     words[word_count]
    u8      low_bits[rest]

Symbols, sorted by class and in order within each: first the tokens of all gaps, then those of
all distances. A gap is the number of unchanged elements of the same class before a changed one.
A distance is folded (see `float_bits`) and one less, because 0 does not occur. Low bits follow
the order of the symbols (see below). Each class has a table for its gaps and one for its
distances (see `shared_tables`).

A token is a symbol of few values, which is entropy coded; low bits are not. 0 to 7 are their own
token. A larger number of which bit `top` is the highest has the token `8 + 4 * (top - 3) + the two
bits below it`, and `top - 2` low bits. 300 = 0b100101100 has top 8, token 8 + 20 + 0 = 28, and the
low bits 0b101100. Low bits are one stream, lowest bit first.
"""

import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from astraflow.codec import kernels, rans
from astraflow.codec.changes import FoundChanges, empty_changes
from astraflow.codec.chunks import chunk_invalid
from astraflow.codec.float_bits import folded_distances, moved
from astraflow.codec.shared_tables import MAX_CLASS_COUNT, ClassRule, ClassTables
from astraflow.codec.state_digest import changed_sums

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


_COUNT: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompactScan:
    """What a range changes, before entropy coding.

    Attributes:
        counts: u32[16], changes by class.
        tokens: u8[2 n], of gaps, then of distances.
        low_bits: Of both.
        histogram: u32[2, 16, 256], how often each token occurs.
        low, high: What the changes add to the sums of the state digest, modulo 2^64.
    """

    counts: np.ndarray
    tokens: np.ndarray
    low_bits: bytes
    histogram: np.ndarray
    low: int
    high: int

    @property
    def changed_count(self) -> int:
        return int(self.counts.sum(dtype=np.int64))

    def without_tokens(self) -> "CompactScan":
        """Leave what is needed of a range that is coded otherwise."""
        return replace(
            self, tokens=self.tokens[:0], low_bits=b"", histogram=np.zeros_like(self.histogram)
        )


def scan(rule: ClassRule, old: np.ndarray, new: np.ndarray, *, first: int) -> CompactScan:
    """Compare a range with the base.

    Args:
        rule: How elements are sorted.
        old: uN[n], its bits in the base.
        new: uN[n], its bits.
        first: Position of the first element.
    """
    level = kernels.level()
    if level < 0:
        return _scan(rule, old, new, first)
    histogram = np.zeros((2, MAX_CLASS_COUNT, 256), np.uint32)
    low, high, counts, tokens, low_bits = kernels.loops.scan_classes(
        level, old, new, old.itemsize, first, *rule.arguments, histogram
    )
    return CompactScan(
        counts=np.frombuffer(counts, np.uint32),
        tokens=np.frombuffer(tokens, np.uint8),
        low_bits=low_bits,
        histogram=histogram,
        low=low,
        high=high,
    )


def encode(scanned: CompactScan, tables: ClassTables) -> bytes | None:
    """Return the payload; None: the tables have no code for something."""
    coded = rans.encode(scanned.tokens, _runs(scanned.counts), tables.tables)
    if coded is None:
        return None
    states, words = coded
    counts = b"".join(_leb128(int(n)) for n in scanned.counts[: tables.rule.class_count])
    return b"".join((counts, _COUNT.pack(len(words) // 2), states, words, scanned.low_bits))


def decode(
    payload: bytes | memoryview,
    old: np.ndarray,
    tables: ClassTables,
    *,
    changed_count: int,
    first: int = 0,
) -> FoundChanges:
    """Return what changed in a range.

    Args:
        payload: As `encode` made it.
        old: Bits (uN[element_count]) of the whole range in the base.
        tables: Of the patch and the dtype.
        changed_count: From the chunk's header.
        first: Position of the range's first element.

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    try:
        level = kernels.level()
        if level < 0:
            return _apply(tables.rule, old, *_read(memoryview(payload), tables, changed_count))
        indices, before, values = empty_changes(changed_count, old.dtype)
        arguments = (level, old, old.itemsize, first, *tables.rule.arguments)
        sums = kernels.loops.decode_compact(
            *arguments, payload, tables.tables.slots, indices, before, values
        )
    except ValueError as error:
        raise chunk_invalid(f"a compact payload {error}") from None
    return FoundChanges(indices, before, values, sums)


def _read(
    payload: memoryview, tables: ClassTables, changed_count: int
) -> tuple[np.ndarray, np.ndarray, bytes]:
    counts = np.zeros(MAX_CLASS_COUNT, np.uint32)
    at = 0
    for place in range(tables.rule.class_count):
        counts[place], at = _read_leb128(payload, at, changed_count)
    if int(counts.sum(dtype=np.int64)) != changed_count:
        raise ValueError("has another number of changes than it says")
    states = at + _COUNT.size
    words = states + 4 * rans.lane_count(2 * changed_count)
    if words > len(payload):
        raise ValueError("is cut off")
    low_bits = words + 2 * _COUNT.unpack_from(payload, at)[0]
    if low_bits > len(payload):
        raise ValueError("is cut off")
    runs = _runs(counts)
    tokens = rans.decode(payload[states:words], payload[words:low_bits], runs, tables.tables)
    return counts, tokens, bytes(payload[low_bits:])


def _runs(counts: np.ndarray) -> rans.SymbolRuns:
    return rans.SymbolRuns.of(np.tile(counts, 2), np.arange(2 * MAX_CLASS_COUNT))


def _scan(rule: ClassRule, old: np.ndarray, new: np.ndarray, first: int) -> CompactScan:
    indices = np.flatnonzero(old != new)
    classes = rule.classes(old)
    changed = classes[indices]
    order = np.argsort(changed, kind="stable")
    counts = np.bincount(changed, minlength=MAX_CLASS_COUNT).astype(np.uint32)
    gaps = np.empty(len(indices), np.uint64)
    for number, part in _parts(counts):
        ranks = np.searchsorted(np.flatnonzero(classes == number), indices[order[part]])
        gaps[part] = np.diff(ranks, prepend=-1) - 1
    before, values = old[indices], new[indices]
    folded = folded_distances(before, values)[order].astype(np.uint64) - np.uint64(1)
    numbers = np.concatenate([gaps, folded])
    tokens, widths = tokens_of(numbers)
    table = np.repeat([0, MAX_CLASS_COUNT], len(changed)) + np.tile(changed[order], 2)
    histogram = np.bincount(256 * table + tokens, minlength=2 * MAX_CLASS_COUNT * 256)
    low, high = changed_sums(indices + first, before, values)
    return CompactScan(
        counts=counts,
        tokens=tokens,
        low_bits=pack_low_bits(numbers, widths),
        histogram=histogram.reshape(2, MAX_CLASS_COUNT, 256).astype(np.uint32),
        low=low,
        high=high,
    )


def _apply(
    rule: ClassRule, old: np.ndarray, counts: np.ndarray, tokens: np.ndarray, low_bits: bytes
) -> FoundChanges:
    numbers = numbers_of(tokens, low_bits)
    gaps, distances = numbers[: len(tokens) // 2], numbers[len(tokens) // 2 :]
    largest = np.iinfo(old.dtype).max
    if len(distances) and distances.max() >= largest:
        raise ValueError("has a distance that its elements cannot have")
    classes, indices = rule.classes(old), np.empty(len(gaps), np.uint32)
    for number, part in _parts(counts):
        members = np.flatnonzero(classes == number)
        if (gaps[part] >= len(old)).any():
            raise ValueError("changes an element beyond its range")
        ranks = np.cumsum(gaps[part].astype(np.int64) + 1) - 1
        if ranks[-1] >= len(members):
            raise ValueError("changes an element beyond its range")
        indices[part] = members[ranks]
    order = np.argsort(indices)
    indices = indices[order]
    folded = (distances[order] + np.uint64(1)).astype(old.dtype)
    return FoundChanges(indices, old[indices], moved(old[indices], folded))


def _parts(counts: np.ndarray) -> list[tuple[int, slice]]:
    """Return each class that has changes, and its part of what is sorted by class."""
    ends = np.cumsum(counts, dtype=np.int64)
    return [
        (number, slice(int(end - counts[number]), int(end)))
        for number, end in enumerate(ends)
        if counts[number]
    ]


def _leb128(value: int) -> bytes:
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_leb128(data: memoryview, at: int, largest: int) -> tuple[int, int]:
    value = 0
    for place in range(5):
        if at + place >= len(data):
            raise ValueError("is cut off")
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            # One number has one form: its last byte is 0 for 0 alone.
            if value > largest or (place and not byte):
                break
            return value, at + place + 1
    raise ValueError("has another number of changes than it says")
