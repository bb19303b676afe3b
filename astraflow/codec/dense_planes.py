"""DENSE_PLANES: all elements of a range, byte by byte of like weight, entropy coded where it pays.

The bits of floats are rotated left by one, which puts the exponent on top and the sign below.
Then, for each byte of an element, the most significant first:

    u8  kind     0: the bytes as they are
                 1: a table (see `tables`), u32 word_count, u32 states[lanes], u16 words[word_count]
"""

import struct
from typing import Final

import numpy as np

from astraflow.codec import rans
from astraflow.codec.exponents import field_of
from astraflow.codec.tables import FrequencyTables, cost_bits, read_tables
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason

_RAW, _CODED = 0, 1
_COUNT: Final = struct.Struct("<I")


def encode(dtype: Dtype, bits: np.ndarray) -> bytes:
    """Return the payload of a range: uN[n]."""
    rotated = _rotated(bits, 1) if field_of(dtype)[1] else bits
    planes = rotated.view(np.uint8).reshape(-1, dtype.itemsize)
    return b"".join(_encode_plane(planes[:, place]) for place in reversed(range(dtype.itemsize)))


def decode(dtype: Dtype, payload: bytes | memoryview, element_count: int) -> np.ndarray:
    """Return the bits of a range: uN[element_count].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself.
    """
    data = memoryview(payload)
    planes = np.empty((element_count, dtype.itemsize), np.uint8)
    at = 0
    try:
        for place in reversed(range(dtype.itemsize)):
            at = _decode_plane(data, at, planes[:, place])
    except (ValueError, IndexError, struct.error) as error:
        raise AstraflowError(Reason.CHUNK_INVALID, f"a payload of planes {error}") from None
    if at != len(data):
        raise AstraflowError(Reason.CHUNK_INVALID, "a payload of planes has bytes behind its end")
    bits = planes.view(dtype.bits).reshape(-1)
    return _rotated(bits, 8 * dtype.itemsize - 1) if field_of(dtype)[1] else bits


def _encode_plane(plane: np.ndarray) -> bytes:
    symbols = np.ascontiguousarray(plane)
    histogram = np.bincount(symbols, minlength=256)
    tables = FrequencyTables.of(histogram[None])
    # What saves less than a sixteenth is not worth its time.
    if 16 * cost_bits(histogram, tables.frequencies[0]) >= 15 * 8 * len(symbols):
        return bytes((_RAW,)) + symbols.tobytes()
    coded = rans.encode(symbols, _run(len(symbols)), tables)
    if coded is None:
        raise AssertionError("the table was made of these symbols")
    states, words = coded
    count = _COUNT.pack(len(words) // 2)
    return b"".join((bytes((_CODED,)), tables.to_bytes(), count, states, words))


def _decode_plane(data: memoryview, at: int, plane: np.ndarray) -> int:
    kind, at = data[at], at + 1
    if kind == _RAW:
        plane[:] = np.frombuffer(data[at : at + len(plane)], np.uint8, len(plane))
        return at + len(plane)
    if kind != _CODED:
        raise ValueError(f"has a plane of kind {kind}, which is not known")
    tables, nbytes = read_tables(data[at:], 1)
    at += nbytes
    (word_count,) = _COUNT.unpack_from(data, at)
    states = at + _COUNT.size
    words = states + 4 * rans.lane_count(len(plane))
    end = words + 2 * word_count
    if end > len(data):
        raise ValueError("is cut off")
    plane[:] = rans.decode(data[states:words], data[words:end], _run(len(plane)), tables)
    return end


def _run(count: int) -> rans.SymbolRuns:
    return rans.SymbolRuns.of(np.array([count]), np.zeros(1, np.int64))


def _rotated(bits: np.ndarray, left: int) -> np.ndarray:
    kind, width = bits.dtype.type, 8 * bits.itemsize
    return (bits << kind(left)) | (bits >> kind(width - left))
