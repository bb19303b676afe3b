"""SPARSE_FAST: gaps between changed elements and signed distances in units of the last place.

Payload:

    u32  gap_nbytes        length of the gaps before compression
    u32  packed_gaps       length as sent; less: one Zstandard frame
    u32  packed_distances  the same of the distances, of which there is one byte per change
    u32  escape_count
    gaps, distances, uN escapes[escape_count]   N: bits of an element

A gap is the number of unchanged elements before a changed one; it is written as so many bytes 255
as fit, then the rest. A distance is folded (see `ordering`); 255 and above are written as 255,
and whole in `escapes`, in order. All integers are little-endian. The two streams are packed each
on its own because their bytes are spread differently.
"""

import struct
import threading
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import zstandard

from astraflow.codec import kernels
from astraflow.codec.changes import Found
from astraflow.codec.ordering import folded_distances, moved, moved_back
from astraflow.core.errors import AstraflowError, Reason

_HEAD: Final = struct.Struct("<4I")
_ESCAPE: Final = 255
_ZSTD_LEVEL: Final = 1
_threads = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """What changed in a range, before compression.

    Attributes:
        gaps: u8[n].
        distances: u8[changed_count].
        escapes: uN[n], as bytes.
    """

    gaps: bytes
    distances: bytes
    escapes: bytes

    def payload(self) -> bytes:
        """Return the payload."""
        gaps, distances = _packed(self.gaps), _packed(self.distances)
        # Each escape is as long as an element, of which there are as many as bytes 255.
        count = self.distances.count(_ESCAPE)
        head = _HEAD.pack(len(self.gaps), len(gaps), len(distances), count)
        return b"".join((head, gaps, distances, self.escapes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scanned:
    """What a range changes.

    Attributes:
        changed_count: Elements that differ.
        low, high: What that adds to the sums of the state digest, modulo 2^64.
        streams: None: longer than was wanted.
    """

    changed_count: int
    low: int
    high: int
    streams: Streams | None


def scan(old: np.ndarray, new: np.ndarray, *, first: int, limit_nbytes: int) -> Scanned:
    """Compare a range with the base, with compiled loops.

    Args:
        old: uN[n], its bits in the base.
        new: uN[n], its bits.
        first: Position of the first element.
        limit_nbytes: Longer streams are not wanted.
    """
    count, low, high, gaps, distances, escapes = kernels.loops.encode_fast(
        kernels.level(), old, new, old.itemsize, first, limit_nbytes
    )
    if gaps is None or distances is None or escapes is None:
        return Scanned(changed_count=count, low=low, high=high, streams=None)
    streams = Streams(gaps=gaps, distances=distances, escapes=escapes)
    return Scanned(changed_count=count, low=low, high=high, streams=streams)


def streams_of(
    indices: np.ndarray, old: np.ndarray, new: np.ndarray, *, limit_nbytes: int
) -> Streams | None:
    """Code the changed elements of a range with numpy; None: the streams would be longer.

    Args:
        indices: i64[n], rising: which elements of the range changed.
        old: uN[n], the bits that they had.
        new: uN[n], the bits that they have.
        limit_nbytes: Longer streams are not wanted.
    """
    folded = folded_distances(old, new)
    escapes = folded[folded >= _ESCAPE].tobytes()
    # Every gap takes a byte at least.
    if 2 * len(indices) + len(escapes) > limit_nbytes:
        return None
    gaps = _encode_gaps(indices)
    if len(gaps) + len(indices) + len(escapes) > limit_nbytes:
        return None
    distances = np.minimum(folded, _ESCAPE).astype(np.uint8).tobytes()
    return Streams(gaps=gaps, distances=distances, escapes=escapes)


def decode(
    payload: bytes | memoryview, old: np.ndarray, *, changed_count: int, first: int = 0
) -> Found:
    """Return what changed in a range.

    Args:
        payload: As `Streams.payload` made it.
        old: Bits (uN[element_count]) of the whole range in the base.
        changed_count: From the chunk's header.
        first: Position of the range's first element.

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    return _decode(payload, old, changed_count, first, is_back=False)


def decode_back(
    payload: bytes | memoryview, new: np.ndarray, *, changed_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a range was before it changed: gaps and distances lead both ways.

    Args:
        payload: As `Streams.payload` made it.
        new: Bits (uN[element_count]) of the whole range in the target.
        changed_count: From the chunk's header.

    Returns:
        i64[n] rising indices, and the old bits uN[n].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    found = _decode(payload, new, changed_count, 0, is_back=True)
    return found.positions, found.values


def read_streams(
    payload: bytes | memoryview, element_count: int, *, itemsize: int, changed_count: int
) -> tuple[bytes, bytes, bytes]:
    """Return gaps (u8[n]), distances (u8[changed_count]) and escapes (uN[n]), unpacked.

    Args:
        payload: As `Streams.payload` made it.
        element_count: Of the range.
        itemsize: Of an element.
        changed_count: From the chunk's header.

    Raises:
        ValueError: They are of other sizes than they say, or larger than a range can need.
    """
    if len(payload) < _HEAD.size:
        raise ValueError("is cut off")
    gap_nbytes, packed_gaps, packed_distances, escape_count = _HEAD.unpack_from(payload)
    sizes = (_HEAD.size, packed_gaps, packed_distances, escape_count * itemsize)
    ends = list(accumulate(sizes))
    if len(payload) != ends[-1] or gap_nbytes > changed_count + element_count // _ESCAPE:
        raise ValueError("has another size than its streams")
    parts = [memoryview(payload)[a:b] for a, b in pairwise(ends)]
    return _unpacked(parts[0], gap_nbytes), _unpacked(parts[1], changed_count), bytes(parts[2])


def _decode(
    payload: bytes | memoryview, start: np.ndarray, changed_count: int, first: int, *, is_back: bool
) -> Found:
    try:
        streams = read_streams(
            payload, len(start), itemsize=start.itemsize, changed_count=changed_count
        )
        level = kernels.level()
        if level < 0:
            return _decode_streams(streams, start, first, is_back=is_back)
        positions = np.empty(changed_count, np.int64)
        bits = np.empty((2, changed_count), start.dtype)
        sums = kernels.loops.decode_fast(
            level, start, start.itemsize, is_back, first, *streams, positions, bits[0], bits[1]
        )
    except ValueError as error:
        raise AstraflowError(Reason.CHUNK_INVALID, f"a sparse payload {error}") from None
    return Found(positions, bits[0], bits[1], sums)


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's; a new one for each stream takes as long as packing it."""
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    return _threads.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_threads, "decompressor"):
        _threads.decompressor = zstandard.ZstdDecompressor()
    return _threads.decompressor


def _packed(stream: bytes) -> bytes:
    packed = _compressor().compress(stream)
    return packed if len(packed) < len(stream) else stream


def _unpacked(stream: memoryview, nbytes: int) -> bytes:
    """Undo the compression; a frame that says it is of another size is refused unread."""
    if len(stream) == nbytes:
        return bytes(stream)
    try:
        if len(stream) > nbytes or zstandard.frame_content_size(stream) != nbytes:
            raise ValueError(f"has a stream that does not unpack to {nbytes} bytes")
        return _decompressor().decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"has a stream that is no zstd frame: {error}") from None


def _decode_streams(
    streams: tuple[bytes, bytes, bytes], start: np.ndarray, first: int, *, is_back: bool
) -> Found:
    gaps, distances = (np.frombuffer(each, np.uint8) for each in streams[:2])
    escapes = np.frombuffer(streams[2], start.dtype)
    indices = _decode_gaps(gaps, len(distances), len(start))
    escaped = np.flatnonzero(distances == _ESCAPE)
    if len(escaped) != len(escapes):
        raise ValueError("has another number of escapes than it says")
    if not distances.all() or (len(escapes) and escapes.min() < _ESCAPE):
        raise ValueError("is not canonical")
    folded = distances.astype(start.dtype)
    folded[escaped] = escapes
    move = moved_back if is_back else moved
    return Found(indices + first, start[indices], move(start[indices], folded))


def _encode_gaps(indices: np.ndarray) -> bytes:
    gaps = np.diff(indices, prepend=-1) - 1
    full, rest = np.divmod(gaps, _ESCAPE)
    ends = np.arange(len(gaps)) + np.cumsum(full)
    stream = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    stream[ends] = rest
    return stream.tobytes()


def _decode_gaps(stream: np.ndarray, count: int, element_count: int) -> np.ndarray:
    ends = np.flatnonzero(stream != _ESCAPE)
    if len(ends) != count or (count and ends[-1] != len(stream) - 1) or (not count and len(stream)):
        raise ValueError("has another number of gaps than of changes")
    # One more per gap: the changed element itself.
    indices = np.cumsum(stream, dtype=np.int64)[ends] + np.arange(count)
    if count and indices[-1] >= element_count:
        raise ValueError("changes an element beyond its range")
    return indices
