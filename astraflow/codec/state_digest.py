"""The state digest: a sum over all elements that an update keeps current in O(changed).

Each element contributes a 128-bit mix of its byte offset and its bits; the digest is their sum,
both halves modulo 2^64. Changing an element subtracts its old contribution and adds its new
one. It finds a receiver's own faults (a wrong base, a torn or lost update); against others guard
the root digests, which are cryptographic.

The mix is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014) over offset * A + bits * B + KEY; the second half multiplies the first by an odd
constant after folding its upper bits down.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from astraflow.codec.decode import Change
from astraflow.core.layout import Layout

_KEY = np.uint64(0x6173747261666C77)
_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xD6E8FEB86659FD93)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_M3 = np.uint64(0xFF51AFD7ED558CCD)
_BLOCK = 1 << 18
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Two sums modulo 2^64."""

    low: int = 0
    high: int = 0

    @classmethod
    def of(cls, layout: Layout, flat: np.ndarray) -> Self:
        """Return the digest of a whole state: u8[nbytes]."""
        low = high = 0
        for spec in layout.tensors:
            bits = flat[spec.offset : spec.offset + spec.nbytes].view(spec.dtype.bits)
            for first in range(0, len(bits), _BLOCK):
                block = bits[first : first + _BLOCK]
                start = spec.offset // spec.dtype.itemsize + first
                positions = np.arange(start, start + len(block), dtype=np.uint64)
                sums = _sums(positions * np.uint64(spec.dtype.itemsize), block)
                low, high = low + sums[0], high + sums[1]
        return cls(low & _MASK, high & _MASK)

    def changed(self, changes: Iterable[tuple[Change, np.ndarray]]) -> "StateDigest":
        """Return the digest after some changes.

        Args:
            changes: Each with the bits (uN[n]) that its elements had before.
        """
        low, high = self.low, self.high
        for change, before in changes:
            offsets = change.positions.astype(np.uint64) * np.uint64(change.dtype.itemsize)
            added, taken = _sums(offsets, change.values), _sums(offsets, before)
            low += added[0] - taken[0]
            high += added[1] - taken[1]
        return StateDigest(low & _MASK, high & _MASK)

    def to_bytes(self) -> bytes:
        """Return it as 16 bytes, little-endian, low half first."""
        return struct.pack("<2Q", self.low, self.high)


def _sums(offsets: np.ndarray, bits: np.ndarray) -> tuple[int, int]:
    """Sum the contributions of elements: u64[n] byte offsets, uN[n] bits."""
    mixed = offsets * _A
    mixed += bits.astype(np.uint64) * _B
    mixed += _KEY
    mixed ^= mixed >> np.uint64(30)
    mixed *= _M1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _M2
    mixed ^= mixed >> np.uint64(31)
    low = int(mixed.sum(dtype=np.uint64))
    mixed ^= mixed >> np.uint64(33)
    mixed *= _M3
    mixed ^= mixed >> np.uint64(29)
    return low, int(mixed.sum(dtype=np.uint64))
