"""Bytes of the published lane.

A push is u64 offset | u64 length, little-endian, then the bytes; one byte 0x01 answers it. A delta
is u64 changed elements | u16 bytes per element | u16 flags (bit 0: 64-bit indices) | i32 reserved,
the indices of the flat buffer in elements, the new bits.
"""

from struct import Struct
from typing import Final

import numpy as np

from astraflow.core.errors import AstraflowError, Reason

PUSH_HEAD: Final = Struct("<QQ")
PUSH_ACK: Final = b"\x01"
_DELTA_HEAD: Final = Struct("<QHHi")
_WIDE: Final = 1
_ELEMENT_NBYTES: Final = 2


def encode_delta(base: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return what turns one flat buffer into another.

    Args:
        base: u16[n].
        target: u16[n].

    Returns:
        u8[...], with 32-bit indices where they suffice.
    """
    changed = np.flatnonzero(base != target)
    is_wide = len(base) > 1 << 32
    indices = changed.astype(np.uint64 if is_wide else np.uint32)
    head = _DELTA_HEAD.pack(len(changed), _ELEMENT_NBYTES, _WIDE if is_wide else 0, 0)
    parts = (np.frombuffer(head, np.uint8), indices.view(np.uint8), target[changed].view(np.uint8))
    return np.concatenate(parts)


def apply_delta(flat: np.ndarray, delta: np.ndarray) -> int:
    """Change a flat buffer in place, or not at all; return how many elements.

    Args:
        flat: u8[n].
        delta: u8[...], nothing behind it.

    Raises:
        AstraflowError: CHUNK_INVALID when sizes contradict each other or an index lies outside.
    """
    if len(delta) < _DELTA_HEAD.size or len(flat) % _ELEMENT_NBYTES:
        raise _invalid("it is too short for its header")
    count, element_nbytes, flags, _ = _DELTA_HEAD.unpack(delta[: _DELTA_HEAD.size].tobytes())
    index = np.dtype("<u8" if flags & _WIDE else "<u4")
    values_at = _DELTA_HEAD.size + count * index.itemsize
    if element_nbytes != _ELEMENT_NBYTES or len(delta) != values_at + count * element_nbytes:
        raise _invalid(f"{len(delta)} bytes are not {count} elements of {element_nbytes} bytes")
    indices = delta[_DELTA_HEAD.size : values_at].copy().view(index)
    elements = flat.view(np.uint16)
    if count and int(indices.max()) >= len(elements):
        raise _invalid(f"index {indices.max()} lies outside of {len(elements)} elements")
    elements[indices] = delta[values_at:].copy().view(np.uint16)
    return count


def _invalid(why: str) -> AstraflowError:
    return AstraflowError(Reason.CHUNK_INVALID, f"a delta of the published lane is unsound: {why}")
