"""SPARSE_FAST: gaps between changed elements, and steps in units of the last place.

Payload, of n changes:

    u32  gap_nbytes, step_count, escape_count   lengths of streams before compression
    u32  packed[4]     lengths of the first four streams as sent; less: one Zstandard frame
    u8   gaps[gap_nbytes]
    u8   ups[(n + 7) / 8], marks[(n + 7) / 8]   a bit per change, lowest first
    u8   steps[step_count]
    uN   escapes[escape_count]                  N: bits of an element

A gap is the number of unchanged elements before a changed one; it is written as so many bytes 255
as fit, then the rest. A change leads up (`ups`) or down in the order of `float_bits`, by one unit,
or further where it is marked. By how many more is its step; 255 and above are written as 255, and
whole in `escapes`, in order. All integers are little-endian.

Nine of ten changes lead to a neighbour, so two bits say most of what there is to say, and need no
work to unpack (docs/adr/0008).

The loops are compiled; where they are not, numpy does the same.
"""

import struct
import threading
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import zstandard

from astraflow.codec import kernels
from astraflow.codec.changes import FoundChanges, empty_changes
from astraflow.codec.chunks import chunk_invalid
from astraflow.codec.float_bits import folded_distances, moved, moved_back
from astraflow.codec.state_digest import changed_sums

ESCAPE: Final = 255

Stream = bytes | memoryview

_HEAD: Final = struct.Struct("<7I")


class Streams(NamedTuple):
    """What changed in a range, before compression: n elements.

    Attributes:
        gaps: u8[gap_nbytes].
        ups: A bit per change: u8[(n + 7) / 8].
        marks: The same.
        steps: u8[step_count].
        escapes: uN[escape_count], as bytes.
    """

    gaps: Stream
    ups: Stream
    marks: Stream
    steps: Stream
    escapes: Stream

    @property
    def nbytes(self) -> int:
        return sum(map(len, self))

    def payload(self, itemsize: int) -> bytes:
        """Return the payload, for elements of so many bytes."""
        packed = [_packed(each) for each in self[:-1]]
        counts = (len(self.gaps), len(self.steps), len(self.escapes) // itemsize)
        return b"".join((_HEAD.pack(*counts, *map(len, packed)), *packed, self.escapes))


def read_streams(
    payload: bytes | memoryview, element_count: int, *, itemsize: int, changed_count: int
) -> Streams:
    """Return the streams of a payload, unpacked.

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
    gap_nbytes, step_count, escape_count, *packed = _HEAD.unpack_from(payload)
    ends = list(accumulate((_HEAD.size, *packed, escape_count * itemsize)))
    most = changed_count + element_count // ESCAPE
    if len(payload) != ends[-1] or gap_nbytes > most or step_count > changed_count:
        raise ValueError("has another size than its streams")
    view, mask_nbytes = memoryview(payload), (changed_count + 7) // 8
    sizes = (gap_nbytes, mask_nbytes, mask_nbytes, step_count, escape_count * itemsize)
    parts = zip(pairwise(ends), sizes, strict=True)
    return Streams(*(_unpacked(view[start:end], nbytes) for (start, end), nbytes in parts))


class _Zstd(threading.local):
    """Of a thread; a new one for each stream takes as long as packing it."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _packed(stream: Stream) -> Stream:
    """Compress what becomes an eighth shorter: less is not worth the time to undo it."""
    packed = _zstd.compressor.compress(stream)
    return packed if 8 * len(packed) < 7 * len(stream) else stream


def _unpacked(stream: memoryview, nbytes: int) -> Stream:
    """Undo the compression; a frame that says it is of another size is refused unread."""
    if len(stream) == nbytes:
        return stream
    try:
        if len(stream) > nbytes or zstandard.frame_content_size(stream) != nbytes:
            raise ValueError(f"has a stream that does not unpack to {nbytes} bytes")
        return _zstd.decompressor.decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"has a stream that is no zstd frame: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastScan:
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


def scan(old: np.ndarray, new: np.ndarray, *, first: int, limit_nbytes: int) -> FastScan:
    """Compare a range with the base.

    Args:
        old: uN[n], its bits in the base.
        new: uN[n], its bits.
        first: Position of the first element.
        limit_nbytes: Longer streams are not wanted.
    """
    level = kernels.level()
    if level < 0:
        indices = np.flatnonzero(old != new)
        before, values = old[indices], new[indices]
        count, (low, high) = len(indices), changed_sums(indices + first, before, values)
        streams = streams_of(indices, before, values, limit_nbytes=limit_nbytes)
    else:
        loop = kernels.loops.encode_fast
        count, low, high, found = loop(level, old, new, old.itemsize, first, limit_nbytes)
        streams = None if found is None else Streams(*found)
    return FastScan(changed_count=count, low=low, high=high, streams=streams)


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
    # Every gap takes a byte at least.
    if len(indices) > limit_nbytes:
        return None
    one = old.dtype.type(1)
    less = folded_distances(old, new) - one
    marks = less > one
    steps = less[marks] >> one
    streams = Streams(
        gaps=_encode_gaps(indices),
        ups=np.packbits(less & one != 0, bitorder="little").tobytes(),
        marks=np.packbits(marks, bitorder="little").tobytes(),
        steps=np.minimum(steps, ESCAPE).astype(np.uint8).tobytes(),
        escapes=steps[steps >= ESCAPE].tobytes(),
    )
    return streams if streams.nbytes <= limit_nbytes else None


def decode(
    payload: bytes | memoryview,
    start: np.ndarray,
    *,
    changed_count: int,
    first: int = 0,
    is_back: bool = False,
) -> FoundChanges:
    """Return what changed in a range; gaps and steps lead both ways.

    Args:
        payload: As `Streams.payload` made it.
        start: Bits (uN[element_count]) of the whole range in the base.
        changed_count: From the chunk's header.
        first: Position of the range's first element.
        is_back: The bits are those of the target: return how they were before.

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    try:
        streams = read_streams(
            payload, len(start), itemsize=start.itemsize, changed_count=changed_count
        )
        level = kernels.level()
        if level < 0:
            return _decode_streams(streams, start, changed_count, is_back=is_back)
        indices, before, values = empty_changes(changed_count, start.dtype)
        sums = kernels.loops.decode_fast(
            level, start, start.itemsize, is_back, first, streams, indices, before, values
        )
    except ValueError as error:
        raise chunk_invalid(f"a sparse payload {error}") from None
    return FoundChanges(indices, before, values, sums)


def _decode_streams(
    streams: Streams, start: np.ndarray, count: int, *, is_back: bool
) -> FoundChanges:
    indices = _decode_gaps(np.frombuffer(streams.gaps, np.uint8), count, len(start))
    ups, marks = (_decode_bits(each, count) for each in (streams.ups, streams.marks))
    # Twice the units above one, the direction in the lowest bit: a folded distance less one.
    less = ups.astype(start.dtype)
    less[marks] |= _decode_steps(streams, less[marks]) << start.dtype.type(1)
    move = moved_back if is_back else moved
    values = move(start[indices], less + start.dtype.type(1))
    return FoundChanges(indices, start[indices], values)


def _decode_bits(stream: Stream, count: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")
    if bits[count:].any():
        raise ValueError("is not canonical")
    return bits[:count].astype(bool)


def _decode_steps(streams: Streams, ups: np.ndarray) -> np.ndarray:
    """Return how far marked changes lead, some of them up: uN[n]."""
    steps = np.frombuffer(streams.steps, np.uint8)
    escapes = np.frombuffer(streams.escapes, ups.dtype)
    if len(steps) != len(ups):
        raise ValueError("has another number of steps than it says")
    is_far = steps == ESCAPE
    if np.count_nonzero(is_far) != len(escapes):
        raise ValueError("has another number of escapes than it says")
    whole = steps.astype(ups.dtype)
    whole[is_far] = escapes
    most = np.iinfo(ups.dtype).max // 2 - ups
    if not steps.all() or (whole > most).any() or (escapes < ESCAPE).any():
        raise ValueError("is not canonical")
    return whole


def _encode_gaps(indices: np.ndarray) -> bytes:
    gaps = np.diff(indices, prepend=-1) - 1
    full, rest = np.divmod(gaps, ESCAPE)
    ends = np.arange(len(gaps)) + np.cumsum(full)
    stream = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, np.uint8)
    stream[ends] = rest
    return stream.tobytes()


def _decode_gaps(stream: np.ndarray, count: int, element_count: int) -> np.ndarray:
    ends = np.flatnonzero(stream != ESCAPE)
    if len(ends) != count or (count and ends[-1] != len(stream) - 1) or (not count and len(stream)):
        raise ValueError("has another number of gaps than of changes")
    # One more per gap: the changed element itself.
    indices = np.cumsum(stream, dtype=np.int64)[ends] + np.arange(count)
    if count and indices[-1] >= element_count:
        raise ValueError("changes an element beyond its range")
    return indices.astype(np.uint32)
