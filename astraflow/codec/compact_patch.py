"""A compact patch: what changed in all ranges is counted before any of it is entropy coded.

Classes are chosen by the first eighth of every range, tables by all changes. Between the two
passes about 3 bytes per change are held.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from astraflow.codec import kernels, sparse_compact
from astraflow.codec.chunks import Chunk
from astraflow.codec.encode_range import (
    EncodedRange,
    encode_compact,
    encode_fast,
    is_sparse,
)
from astraflow.codec.exponents import (
    MAX_CLASS_COUNT,
    ClassRule,
    exponent_histogram,
    field_of,
    rule_for,
)
from astraflow.codec.in_order import in_order
from astraflow.codec.runs import ChunkRange
from astraflow.codec.shared_tables import ClassTables, write_shared_tables
from astraflow.core.dtype import Dtype

_SAMPLED_SHARE: Final = 8
_LEAST_SAMPLE: Final = 1 << 15

Read = Callable[[ChunkRange], np.ndarray]


def encode_compact_ranges(
    ranges: Sequence[ChunkRange], target: Read, base: Read, thread_count: int = 1
) -> tuple[list[EncodedRange], bytes]:
    """Encode all ranges of a patch, and return its shared tables too."""
    rules = _rules(ranges, target, base)

    def scan(where: ChunkRange) -> sparse_compact.Scanned | None:
        rule = rules.get(where.dtype)
        if rule is None:
            return None
        found = sparse_compact.scan(rule, base(where), target(where), first=where.first)
        return _kept(where, found)

    scanned = in_order(scan, ranges, thread_count)
    sections = _sections(rules, ranges, scanned)

    def encode(at: int) -> EncodedRange:
        return _encode(ranges[at], target, base, scanned[at], sections)

    encoded = in_order(encode, range(len(ranges)), thread_count)
    return encoded, write_shared_tables(sections.values())


def encode_compact_range(
    where: ChunkRange, new: np.ndarray, old: np.ndarray, tables: ClassTables
) -> Chunk:
    """Encode one range with the tables of its patch."""
    scanned = sparse_compact.scan(tables.rule, old, new, first=where.first)
    return encode_compact(where, new, scanned, tables)


def _sections(
    rules: Mapping[Dtype, ClassRule],
    ranges: Sequence[ChunkRange],
    scanned: Sequence[sparse_compact.Scanned | None],
) -> Mapping[Dtype, ClassTables]:
    histograms = {dtype: np.zeros((2, MAX_CLASS_COUNT, 256), np.int64) for dtype in rules}
    for where, found in zip(ranges, scanned, strict=True):
        if found is not None:
            histograms[where.dtype] += found.histogram
    return {dtype: ClassTables.of(rules[dtype], histograms[dtype]) for dtype in rules}


def _encode(
    where: ChunkRange,
    target: Read,
    base: Read,
    scanned: sparse_compact.Scanned | None,
    sections: Mapping[Dtype, ClassTables],
) -> EncodedRange:
    if scanned is None:
        return encode_fast(where, target(where), base(where))
    chunk = encode_compact(where, target(where), scanned, sections[where.dtype])
    if isinstance(chunk.payload, memoryview):
        # A copy: a patch outlives the state that it was cut from.
        chunk = Chunk(header=chunk.header, payload=bytes(chunk.payload))
    return EncodedRange(chunk=chunk, low=scanned.low, high=scanned.high)


def _kept(where: ChunkRange, scanned: sparse_compact.Scanned) -> sparse_compact.Scanned:
    """Leave out the tokens of a range that is coded whole: they belong in no table."""
    if is_sparse(where, scanned.changed_count):
        return scanned
    return scanned.without_tokens()


def _rules(ranges: Sequence[ChunkRange], target: Read, base: Read) -> Mapping[Dtype, ClassRule]:
    histograms: dict[Dtype, np.ndarray] = {}
    shares: dict[Dtype, list[int]] = {}
    for where in ranges:
        count = min(where.element_count, max(where.element_count // _SAMPLED_SHARE, _LEAST_SAMPLE))
        counted = _count(where.dtype, base(where)[:count], target(where)[:count])
        histograms[where.dtype] = counted + histograms.get(where.dtype, 0)
        share = shares.setdefault(where.dtype, [0, 0])
        share[0] += count
        share[1] += where.element_count
    rules: dict[Dtype, ClassRule] = {}
    for dtype, histogram in histograms.items():
        sampled, of_all = shares[dtype]
        rule = rule_for(dtype, histogram, int(histogram.sum()) * of_all // sampled)
        if rule is not None:
            rules[dtype] = rule
    return rules


def _count(dtype: Dtype, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    level = kernels.level()
    if level < 0:
        return exponent_histogram(dtype, old, new)
    shift, field = field_of(dtype)
    histogram = np.zeros(field + 1, np.uint32)
    kernels.loops.exponents(level, old, new, dtype.itemsize, shift, field, histogram)
    return histogram.astype(np.int64)
