"""Encoding: two versions become chunks. Canonical: the same two give the same bytes.

One range becomes one chunk, by the cheapest encoding by the rules of docs/codec.md. What changed
in all ranges of a compact patch is counted before any of it is entropy coded: classes are chosen by
the first eighth of every range, tables by all changes. Between the two passes about 3 bytes per
change are held.

The compiled loops, Zstandard and BLAKE3 release the interpreter's lock, so threads bring what the
cores have. Results come in the order of the items, so bytes do not depend on the count of threads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from astraflow.codec import dense_planes, sparse_compact, sparse_fast
from astraflow.codec.chunks import (
    Chunk,
    ChunkRange,
    Encoding,
    Profile,
    Runs,
    make_chunk,
    merge_unchanged,
    numbered,
)
from astraflow.codec.shared_tables import (
    MAX_CLASS_COUNT,
    ClassRule,
    ClassTables,
    exponent_histogram,
    read_shared_tables,
    rule_for,
    write_shared_tables,
)
from astraflow.codec.state_digest import StateDigest
from astraflow.core.tensors import Dtype

RangeBits = Callable[[ChunkRange], np.ndarray]
"""Gives the bits of a range, uN[element_count]: a view, or valid until the next call."""

_Item = TypeVar("_Item")

_Result = TypeVar("_Result")


def in_order(
    work: Callable[[_Item], _Result], items: Sequence[_Item], thread_count: int
) -> Iterator[_Result]:
    """Yield what each item becomes, as soon as it and those before it are done.

    Args:
        work: May be called by several threads at once when there is more than one.
        items: What it is called with.
        thread_count: 1: the caller's thread does all of it.
    """
    count = min(thread_count, len(items))
    if count < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=count, thread_name_prefix="codec") as pool:
        yield from pool.map(work, items)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedRange:
    """A chunk, and what its changes add to the sums of the state digest, modulo 2^64."""

    chunk: Chunk
    low: int = 0
    high: int = 0


def encode_fast(where: ChunkRange, new: np.ndarray, old: np.ndarray) -> EncodedRange:
    """Encode what changed, uN[n] each, for the profile FAST."""
    return fast_range(where, _fast_scan(where, new, old), new.tobytes)


def encode_compact(
    where: ChunkRange,
    new: np.ndarray,
    old: np.ndarray,
    scanned: sparse_compact.CompactScan,
    tables: ClassTables,
) -> Chunk:
    """Encode what changed by the smallest encoding, for the profile COMPACT."""
    if not scanned.changed_count:
        return make_chunk(where, Encoding.UNCHANGED)
    count, best = scanned.changed_count, None
    payload = sparse_compact.encode(scanned, tables) if len(scanned.tokens) else None
    if payload is not None:
        best = make_chunk(where, Encoding.SPARSE_COMPACT, payload, changed_count=count)
    if best is None or 2 * len(best.payload) > where.nbytes:
        dense = encode_dense(where, new, Profile.COMPACT)
        if best is None or len(dense.payload) < len(best.payload):
            best = dense
    if _may_be_fast(where, new, old, count, len(best.payload)):
        fast = encode_fast(where, new, old).chunk
        return fast if len(fast.payload) < len(best.payload) else best
    return best


def _compact_scan(
    where: ChunkRange, new: np.ndarray, old: np.ndarray, rule: ClassRule
) -> sparse_compact.CompactScan:
    """Compare a range with the base; noise, which is mostly low bits, has no place in tables."""
    found = sparse_compact.scan(rule, old, new, first=where.first)
    return found if 2 * len(found.low_bits) <= where.nbytes else found.without_tokens()


_TRIED_SHARE: Final = 32
_TRIED_PARTS: Final = 8
_LEAST_CHANGES: Final = 64


def _may_be_fast(
    where: ChunkRange, new: np.ndarray, old: np.ndarray, changed_count: int, nbytes: int
) -> bool:
    """Whether SPARSE_FAST may take fewer bytes than the best encoding, by its size for some parts.

    It does where changes repeat, or are distributed as in no other range: what Zstandard finds in
    one range, tables of all ranges do not have.
    """
    count = max(where.element_count // _TRIED_SHARE, _LEAST_SAMPLE) // _TRIED_PARTS
    if count * _TRIED_PARTS >= where.element_count:
        return True
    starts = (part * where.element_count // _TRIED_PARTS for part in range(_TRIED_PARTS))
    parts = [slice(start, start + count) for start in starts]
    sample = replace(where, nbytes=count * _TRIED_PARTS * where.dtype.itemsize)
    tried = _fast_scan(sample, *(np.concatenate([bits[at] for at in parts]) for bits in (new, old)))
    if tried.changed_count < _LEAST_CHANGES:
        return True
    if tried.streams is None:
        return False
    scaled = len(tried.streams.payload(where.dtype.itemsize)) * changed_count
    return 8 * scaled < 9 * nbytes * tried.changed_count


def encode_dense(where: ChunkRange, new: np.ndarray, profile: Profile) -> Chunk:
    """Encode all of a range; a raw payload looks into `new`."""
    if profile is Profile.COMPACT:
        payload = dense_planes.encode(where.dtype, new)
        if len(payload) < where.nbytes:
            return make_chunk(where, Encoding.DENSE_PLANES, payload)
    return make_chunk(where, Encoding.DENSE, new.view(np.uint8).data)


def fast_range(
    where: ChunkRange, found: sparse_fast.FastScan, whole: Callable[[], bytes]
) -> EncodedRange:
    """Choose between what changed and the whole range, for the profile FAST.

    Args:
        where: The range.
        found: What changed.
        whole: Gives a copy of the range: a patch outlives the state that it was cut from.
    """
    streams, count = found.streams, found.changed_count
    payload = None if streams is None or not count else streams.payload(where.dtype.itemsize)
    if not count:
        chunk = make_chunk(where, Encoding.UNCHANGED)
    elif payload is not None and len(payload) < where.nbytes:
        chunk = make_chunk(where, Encoding.SPARSE_FAST, payload, changed_count=count)
    else:
        chunk = make_chunk(where, Encoding.DENSE, whole())
    return EncodedRange(chunk=chunk, low=found.low, high=found.high)


def fast_limit(where: ChunkRange) -> int:
    """Return the most that the streams of a range may have, in bytes."""
    return where.nbytes * 5 // 4


def _fast_scan(where: ChunkRange, new: np.ndarray, old: np.ndarray) -> sparse_fast.FastScan:
    return sparse_fast.scan(old, new, first=where.first, limit_nbytes=fast_limit(where))


_SAMPLED_SHARE: Final = 8
_LEAST_SAMPLE: Final = 1 << 15


def encode_compact_ranges(
    ranges: Sequence[ChunkRange], target: RangeBits, base: RangeBits, thread_count: int = 1
) -> tuple[list[EncodedRange], bytes]:
    """Encode all ranges of a patch, and return its shared tables too."""
    rules = _rules(ranges, target, base)

    def scan(where: ChunkRange) -> sparse_compact.CompactScan | None:
        rule = rules.get(where.dtype)
        if rule is None:
            return None
        return _compact_scan(where, target(where), base(where), rule)

    scanned = [*in_order(scan, ranges, thread_count)]
    histograms = {dtype: np.zeros((2, MAX_CLASS_COUNT, 256), np.int64) for dtype in rules}
    for where, found in zip(ranges, scanned, strict=True):
        if found is not None:
            histograms[where.dtype] += found.histogram
    sections = {dtype: ClassTables.of(rules[dtype], histograms[dtype]) for dtype in rules}

    def encode(at: int) -> EncodedRange:
        where, found = ranges[at], scanned[at]
        if found is None:
            return encode_fast(where, target(where), base(where))
        tables = sections[where.dtype]
        chunk = encode_compact(where, target(where), base(where), found, tables)
        if isinstance(chunk.payload, memoryview):
            # A copy: a patch outlives the state that it was cut from.
            chunk = replace(chunk, payload=bytes(chunk.payload))
        return EncodedRange(chunk=chunk, low=found.low, high=found.high)

    encoded = [*in_order(encode, range(len(ranges)), thread_count)]
    # Without its section a dtype is coded as for FAST: one that changes nothing is left out.
    as_fast = (Encoding.UNCHANGED, Encoding.SPARSE_FAST)
    used = {
        each.chunk.header.dtype for each in encoded if each.chunk.header.encoding not in as_fast
    }
    return encoded, write_shared_tables(sections[dtype] for dtype in sections if dtype in used)


def _rules(
    ranges: Sequence[ChunkRange], target: RangeBits, base: RangeBits
) -> Mapping[Dtype, ClassRule]:
    histograms: dict[Dtype, np.ndarray] = {}
    shares: dict[Dtype, list[int]] = {}
    for where in ranges:
        count = min(where.element_count, max(where.element_count // _SAMPLED_SHARE, _LEAST_SAMPLE))
        counted = exponent_histogram(where.dtype, base(where)[:count], target(where)[:count])
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPatch:
    """A patch from a base.

    Attributes:
        chunks: By index.
        shared_tables: What all of them are decoded with; may be empty.
        digest: Of the state that it leads to.
    """

    chunks: tuple[Chunk, ...]
    shared_tables: bytes = b""
    digest: StateDigest


def flat_bits(flat: np.ndarray) -> RangeBits:
    """Return what gives views of a flat state: u8[nbytes]."""
    return lambda where: flat[where.bytes].view(where.dtype.bits)


def encode_patch(
    runs: Runs,
    target: RangeBits,
    base: RangeBits,
    digest: StateDigest,
    *,
    profile: Profile = Profile.FAST,
    thread_count: int = 1,
    made: Callable[[Chunk], None] = lambda _: None,
) -> EncodedPatch:
    """Return the patch that leads from `base` to `target`.

    Every range takes its cheapest encoding by the rule in docs/codec.md. Neighbouring ranges
    that did not change are one chunk without a payload.

    Args:
        runs: Of the layout of both, or of a part of it.
        target: The new state. The profile COMPACT reads a part of each range twice.
        base: The old one.
        digest: Of the old one.
        profile: How it is coded.
        thread_count: How many ranges are worked on at once. With more than 1, `target` and `base`
            are called by several threads; what they return stays valid until the same thread's
            next call, and in the profile COMPACT for good: views.
        made: Called with each chunk, in order, as soon as it is known.
    """
    tables, ranges = b"", list(runs.ranges())
    if profile is Profile.COMPACT:
        encoded, tables = encode_compact_ranges(ranges, target, base, thread_count)
    else:

        def encode(where: ChunkRange) -> EncodedRange:
            return encode_fast(where, target(where), base(where))

        encoded = in_order(encode, ranges, thread_count)
    low = high = 0

    def chunk_of(each: EncodedRange) -> Chunk:
        nonlocal low, high
        low, high = low + each.low, high + each.high
        return each.chunk

    chunks = numbered(merge_unchanged(map(chunk_of, encoded)), made)
    return EncodedPatch(chunks=chunks, shared_tables=tables, digest=digest.plus_sums(low, high))


def encode_whole(
    runs: Runs, target: RangeBits, *, profile: Profile = Profile.FAST
) -> tuple[Chunk, ...]:
    """Return the patch that leads from nothing to `target`: its chunks are all of it.

    Args:
        runs: Of its layout, or of a part of it.
        target: The state; raw payloads look into what it returns.
        profile: How it is coded.
    """
    return numbered(encode_dense(where, target(where), profile) for where in runs.ranges())


def encode_chunk(
    where: ChunkRange,
    new: np.ndarray,
    old: np.ndarray | None,
    *,
    profile: Profile = Profile.FAST,
    tables: bytes = b"",
) -> Chunk:
    """Encode one range alone: the chunk that a patch has there, but for its index.

    Neighbouring ranges that did not change are one chunk in a patch.

    Args:
        where: The range.
        new: uN[element_count], its bits.
        old: uN[element_count], its bits in the base; None: from nothing.
        profile: Of the patch.
        tables: Its `shared_tables`.
    """
    if old is None:
        return encode_dense(where, new, profile)
    section = read_shared_tables(tables).get(where.dtype)
    if profile is Profile.FAST or section is None:
        return encode_fast(where, new, old).chunk
    scanned = _compact_scan(where, new, old, section.rule)
    return encode_compact(where, new, old, scanned, section)
