"""The state digest: a sum over all elements that an update keeps current in O(changed).

Each element contributes a 128-bit mix of its byte offset and its bits; the digest is the sum of
all, both halves modulo 2^64. Changing an element subtracts its old contribution and adds its new
one. It finds a receiver's own faults (a wrong base, a torn or lost update). Others can forge it:
against them guard the root digests, which are cryptographic (ADR 18).

With x = offset * A + bits * B + KEY, the first half sums splitmix64's finaliser of x (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, 2014), and the second half one more
round of it. docs/weights.md has the constants.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from astraflow.codec import kernels
from astraflow.codec.changes import Change
from astraflow.codec.chunks import ChunkRange
from astraflow.core.tensors import Layout

_KEY: Final = np.uint64(0x6173747261666C77)
_A: Final = np.uint64(0x9E3779B97F4A7C15)
_B: Final = np.uint64(0xD6E8FEB86659FD93)
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)
_M3: Final = np.uint64(0xFF51AFD7ED558CCD)

MIXING: Final = (_KEY, _A, _B, _M1, _M2, _M3)
"""Constants of the function that mixes offsets and bits."""

_MASK: Final = (1 << 64) - 1

# Elements per pass: two arrays of 8 bytes each stay in the cache.
_BLOCK: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Two sums modulo 2^64."""

    low: int = 0
    high: int = 0

    @classmethod
    def of(cls, layout: Layout, flat: np.ndarray) -> Self:
        """Return the digest of a whole state: u8[nbytes]."""
        return cls.of_pieces(_tensors(layout, flat))

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[ChunkRange, np.ndarray]]) -> Self:
        """Return what pieces of tensors contribute: ranges and their bits, uN[element_count].

        Shares of a state that do not overlap add up to its digest.
        """
        low = high = 0
        for where, bits in pieces:
            sums = _array_sums(where.first, bits)
            low, high = low + sums[0], high + sums[1]
        return cls(low & _MASK, high & _MASK)

    def plus(self, other: "StateDigest") -> "StateDigest":
        """Return the digest of two shares of a state that do not overlap."""
        return self.plus_sums(other.low, other.high)

    def plus_sums(self, low: int, high: int) -> "StateDigest":
        """Return the digest with something added to both sums."""
        return StateDigest((self.low + low) & _MASK, (self.high + high) & _MASK)

    def after(self, change: Change) -> "StateDigest":
        """Return the digest of the state that a change leaves."""
        sums = change.sums
        if sums is None:
            sums = changed_sums(change.positions, change.before, change.values)
        return self.plus_sums(*sums)

    @classmethod
    def from_bytes(cls, digest: bytes) -> Self:
        return cls(*struct.unpack("<2Q", digest))

    def to_bytes(self) -> bytes:
        """Return it as 16 bytes, little-endian, first half first."""
        return struct.pack("<2Q", self.low, self.high)


def changed_sums(positions: np.ndarray, before: np.ndarray, values: np.ndarray) -> tuple[int, int]:
    """Return what changes add to both sums, modulo 2^64.

    Args:
        positions: i64[n], byte offsets divided by the element size.
        before: uN[n], the bits there.
        values: uN[n], the bits that they become.
    """
    level = kernels.level()
    if level >= 0:
        return kernels.loops.digest_changes(level, positions, before, values, values.itemsize)
    low = high = 0
    for first in range(0, len(positions), _BLOCK):
        part = slice(first, first + _BLOCK)
        places = positions[part].astype(np.uint64)
        added = _sums(places, values[part], values.itemsize)
        taken = _sums(places, before[part], values.itemsize)
        low += added[0] - taken[0]
        high += added[1] - taken[1]
    return low & _MASK, high & _MASK


def _tensors(layout: Layout, flat: np.ndarray) -> Iterator[tuple[ChunkRange, np.ndarray]]:
    for spec in layout.tensors:
        where = ChunkRange(offset=spec.offset, nbytes=spec.nbytes, dtype=spec.dtype)
        yield where, flat[where.bytes].view(spec.dtype.bits)


def _array_sums(position: int, bits: np.ndarray) -> tuple[int, int]:
    """Sum the contributions of neighbouring elements, uN[n], from a position on."""
    level = kernels.level()
    if level >= 0:
        return kernels.loops.digest_array(level, bits, bits.itemsize, position)
    low = high = 0
    for first in range(0, len(bits), _BLOCK):
        block = bits[first : first + _BLOCK]
        start = position + first
        positions = np.arange(start, start + len(block), dtype=np.uint64)
        sums = _sums(positions, block, bits.itemsize)
        low, high = low + sums[0], high + sums[1]
    return low, high


def _sums(positions: np.ndarray, bits: np.ndarray, itemsize: int) -> tuple[int, int]:
    mixed = positions * np.uint64(itemsize * int(_A) & _MASK)
    mixed += _KEY
    scratch = np.multiply(bits, _B, dtype=np.uint64)
    mixed += scratch
    _fold(mixed, 30, scratch)
    mixed *= _M1
    _fold(mixed, 27, scratch)
    mixed *= _M2
    _fold(mixed, 31, scratch)
    low = int(np.add.reduce(mixed))
    _fold(mixed, 33, scratch)
    mixed *= _M3
    _fold(mixed, 29, scratch)
    return low, int(np.add.reduce(mixed))


def _fold(mixed: np.ndarray, shift: int, scratch: np.ndarray) -> None:
    """Do `mixed ^= mixed >> shift` in place."""
    np.right_shift(mixed, np.uint64(shift), out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
