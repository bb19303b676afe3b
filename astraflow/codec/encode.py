"""Encoding: two versions become chunks. Canonical: the same two give the same bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from astraflow.codec.chunk_list import merge_unchanged, numbered
from astraflow.codec.chunks import Chunk, Profile
from astraflow.codec.compact_patch import encode_compact_range, encode_compact_ranges
from astraflow.codec.encode_range import EncodedRange, encode_dense, encode_fast
from astraflow.codec.in_order import each_in_order, in_order
from astraflow.codec.runs import ChunkRange
from astraflow.codec.shared_tables import read_shared_tables
from astraflow.codec.state_digest import StateDigest

RangeBits = Callable[[ChunkRange], np.ndarray]
"""Gives the bits of a range, uN[element_count]: a view, or valid until the next call."""


class Ranges(Protocol):
    """What is encoded: a layout, or a part of one."""

    def ranges(self) -> Iterator[ChunkRange]:
        """Yield its ranges, by offset."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A patch from nothing.

    Attributes:
        chunks: By index.
        shared_tables: What all of them are decoded with; may be empty.
    """

    chunks: tuple[Chunk, ...]
    shared_tables: bytes = b""


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
    runs: Ranges,
    target: RangeBits,
    base: RangeBits,
    digest: StateDigest,
    *,
    profile: Profile = Profile.FAST,
    thread_count: int = 1,
    made: Callable[[Chunk], None] = lambda _: None,
) -> EncodedPatch:
    """Return the patch that leads from `base` to `target`.

    Every range takes its cheapest encoding by the rule in docs/weights.md. Neighbouring ranges
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

        encoded = each_in_order(encode, ranges, thread_count)
    sums = _Sums()
    chunks = numbered(merge_unchanged(map(sums.add, encoded)), made)
    after = digest.plus_sums(sums.low, sums.high)
    return EncodedPatch(chunks=chunks, shared_tables=tables, digest=after)


def encode_whole(
    runs: Ranges,
    target: RangeBits,
    *,
    profile: Profile = Profile.FAST,
    thread_count: int = 1,
) -> Encoded:
    """Return the patch that leads from nothing to `target`.

    Args:
        runs: Of its layout, or of a part of it.
        target: The state; raw payloads look into what it returns.
        profile: How it is coded.
        thread_count: As for `encode_patch`.
    """

    def encode(where: ChunkRange) -> Chunk:
        return encode_dense(where, target(where), profile)

    return Encoded(chunks=numbered(in_order(encode, list(runs.ranges()), thread_count)))


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
    return encode_compact_range(where, new, old, section)


class _Sums:
    """Adds up what the changes of ranges add to the sums of the state digest."""

    def __init__(self) -> None:
        self.low = self.high = 0

    def add(self, encoded: EncodedRange) -> Chunk:
        self.low += encoded.low
        self.high += encoded.high
        return encoded.chunk
