"""SPARSE_FAST: gaps between changed elements and signed distances in units of the last place.

Payload, before compression:

    u32  gap_nbytes       length of the first stream
    u32  escape_count     elements of the third
    u8   gaps[gap_nbytes]
    u8   distances[changed_count]
    uN   escapes[escape_count]   N: bits of an element

A gap is the number of unchanged elements before a changed one; it is written as so many bytes 255
as fit, then the rest. A distance is zig-zag coded (0, -1, 1, -2 ... become 0, 1, 2, 3 ...); 255
and above are written as 255, and whole in `escapes`, in order. All integers are little-endian.

Distances count in an order of the bit patterns in which neighbours are one unit of the last
place apart: the sign bit is flipped for positive numbers, all bits for negative ones. It is a
bijection, so NaNs and signed zeros survive bit by bit.
"""

import struct

import numpy as np

from astraflow.core.errors import AstraflowError, Reason

_HEAD = struct.Struct("<II")
_ESCAPE = 255


def encode(
    indices: np.ndarray, old: np.ndarray, new: np.ndarray, *, limit_nbytes: int
) -> bytes | None:
    """Code the changed elements of a range.

    Args:
        indices: i64[n], rising: which elements of the range changed.
        old: uN[n], the bits that they had.
        new: uN[n], the bits that they have.
        limit_nbytes: A longer payload is not wanted.

    Returns:
        None when it would be longer.
    """
    zigzag = _zigzag(_ordered(new) - _ordered(old))
    escapes = zigzag[zigzag >= _ESCAPE]
    # Every gap takes a byte at least.
    if _HEAD.size + 2 * len(indices) + escapes.nbytes > limit_nbytes:
        return None
    gaps = _encode_gaps(indices)
    distances = np.minimum(zigzag, _ESCAPE).astype(np.uint8)
    parts = (_HEAD.pack(len(gaps), len(escapes)), gaps, distances.tobytes(), escapes.tobytes())
    payload = b"".join(parts)
    return payload if len(payload) <= limit_nbytes else None


def decode(
    payload: bytes | memoryview, old: np.ndarray, *, changed_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what changed in a range.

    Args:
        payload: As `encode` made it.
        old: Bits (uN[element_count]) of the whole range in the base.
        changed_count: From the chunk's header.

    Returns:
        i64[n] rising indices, and the new bits uN[n].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    indices, distances = _decode_streams(payload, old, changed_count)
    return indices, _unordered(_ordered(old[indices]) + distances)


def decode_back(
    payload: bytes | memoryview, new: np.ndarray, *, changed_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a range was before it changed: gaps and distances lead both ways.

    Args:
        payload: As `encode` made it.
        new: Bits (uN[element_count]) of the whole range in the target.
        changed_count: From the chunk's header.

    Returns:
        i64[n] rising indices, and the old bits uN[n].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    indices, distances = _decode_streams(payload, new, changed_count)
    return indices, _unordered(_ordered(new[indices]) - distances)


def _decode_streams(
    payload: bytes | memoryview, like: np.ndarray, changed_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return i64[n] rising indices, uN[n] distances modulo 2^N; `like`: any bits of the range."""
    if len(payload) < _HEAD.size:
        raise _invalid("is cut off")
    gap_nbytes, escape_count = _HEAD.unpack_from(payload)
    if len(payload) != _HEAD.size + gap_nbytes + changed_count + escape_count * like.itemsize:
        raise _invalid("has another size than its streams")
    gaps = np.frombuffer(payload, np.uint8, gap_nbytes, _HEAD.size)
    distances = np.frombuffer(payload, np.uint8, changed_count, _HEAD.size + gap_nbytes)
    escapes = np.frombuffer(
        payload, like.dtype, escape_count, _HEAD.size + gap_nbytes + changed_count
    )
    indices = _decode_gaps(gaps, changed_count, len(like))
    zigzag = distances.astype(like.dtype)
    escaped = np.flatnonzero(distances == _ESCAPE)
    if len(escaped) != escape_count:
        raise _invalid("has another number of escapes than it says")
    if not distances.all() or (escape_count and escapes.min() < _ESCAPE):
        raise _invalid("is not canonical")
    zigzag[escaped] = escapes
    return indices, _unzigzag(zigzag)


def largest_nbytes(element_count: int, itemsize: int) -> int:
    """Return the most that a payload of a range can have, whatever changed."""
    return _HEAD.size + element_count * (2 + itemsize) + element_count // _ESCAPE + 1


def _encode_gaps(indices: np.ndarray) -> bytes:
    gaps = np.empty_like(indices)
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps[1:] -= 1
    wide = np.flatnonzero(gaps >= _ESCAPE)
    if not len(wide):
        return gaps.astype(np.uint8).tobytes()
    full, rest = np.divmod(gaps[wide], _ESCAPE)
    gaps[wide] = rest
    ends = np.arange(len(gaps))
    ends += _spread(full, wide, len(gaps))
    stream = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    stream[ends] = gaps
    return stream.tobytes()


def _spread(full: np.ndarray, wide: np.ndarray, count: int) -> np.ndarray:
    """Return how many bytes 255 come before the end of each gap: i64[count]."""
    before = np.zeros(count, np.int64)
    before[wide] = full
    return np.cumsum(before)


def _decode_gaps(stream: np.ndarray, count: int, element_count: int) -> np.ndarray:
    ends = np.flatnonzero(stream != _ESCAPE)
    if len(ends) != count or (count and ends[-1] != len(stream) - 1) or (not count and len(stream)):
        raise _invalid("has another number of gaps than of changes")
    # One more per gap: the changed element itself.
    indices = np.cumsum(stream, dtype=np.int64)
    if len(stream) > count:
        indices = indices[ends]
    indices += np.arange(count)
    if count and indices[-1] >= element_count:
        raise _invalid("changes an element beyond its range")
    return indices


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Flip the sign bit of positive numbers, all bits of negative ones."""
    top, sign = _top(bits.dtype)
    flips = np.negative(bits >> top)
    flips |= sign
    return bits ^ flips


def _unordered(ordered: np.ndarray) -> np.ndarray:
    top, sign = _top(ordered.dtype)
    flips = (ordered >> top) - ordered.dtype.type(1)
    flips |= sign
    return ordered ^ flips


def _top(dtype: np.dtype[np.unsignedinteger]) -> tuple[np.unsignedinteger, np.unsignedinteger]:
    """Return the place of the sign bit, and the bit."""
    place = 8 * dtype.itemsize - 1
    return dtype.type(place), dtype.type(1 << place)


def _zigzag(distance: np.ndarray) -> np.ndarray:
    """Fold signed distances, given modulo 2^N, into unsigned ones."""
    top, _ = _top(distance.dtype)
    return (distance << distance.dtype.type(1)) ^ np.negative(distance >> top)


def _unzigzag(folded: np.ndarray) -> np.ndarray:
    one = folded.dtype.type(1)
    return (folded >> one) ^ np.negative(folded & one)


def _invalid(why: str) -> AstraflowError:
    return AstraflowError(Reason.CHUNK_INVALID, f"a sparse payload {why}")
