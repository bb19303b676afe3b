"""The payload of SPARSE_FAST: gaps between changed elements, and steps in units of the last place.

Payload, of n changes:

    u32  gap_nbytes, step_count, escape_count   lengths of streams before compression
    u32  packed[4]     lengths of the first four streams as sent; less: one Zstandard frame
    u8   gaps[gap_nbytes]
    u8   ups[(n + 7) / 8], marks[(n + 7) / 8]   a bit per change, lowest first
    u8   steps[step_count]
    uN   escapes[escape_count]                  N: bits of an element

A gap is the number of unchanged elements before a changed one; it is written as so many bytes 255
as fit, then the rest. A change leads up (`ups`) or down in the order of `ordering`, by one unit, or
further where it is marked. By how many more is its step; 255 and above are written as 255, and
whole in `escapes`, in order. All integers are little-endian.

Nine of ten changes lead to a neighbour, so two bits say most of what there is to say, and need no
work to unpack (docs/adr/0008).
"""

import struct
import threading
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import zstandard

ESCAPE: Final = 255

Stream = bytes | memoryview

_HEAD: Final = struct.Struct("<7I")
_ZSTD_LEVEL: Final = 1
_threads = threading.local()


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
        """Of all of them."""
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


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's; a new one for each stream takes as long as packing it."""
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    return _threads.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_threads, "decompressor"):
        _threads.decompressor = zstandard.ZstdDecompressor()
    return _threads.decompressor


def _packed(stream: Stream) -> Stream:
    """Compress what becomes an eighth shorter: less is not worth the time to undo it."""
    packed = _compressor().compress(stream)
    return packed if 8 * len(packed) < 7 * len(stream) else stream


def _unpacked(stream: memoryview, nbytes: int) -> Stream:
    """Undo the compression; a frame that says it is of another size is refused unread."""
    if len(stream) == nbytes:
        return stream
    try:
        if len(stream) > nbytes or zstandard.frame_content_size(stream) != nbytes:
            raise ValueError(f"has a stream that does not unpack to {nbytes} bytes")
        return _decompressor().decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"has a stream that is no zstd frame: {error}") from None
