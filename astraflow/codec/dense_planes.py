"""DENSE_PLANES: all elements of a range, byte by byte of like weight, entropy coded where it pays.

The bits of floats are rotated left by one, which puts the exponent on top and the sign below.
Then, for each byte of an element, the most significant first:

    u8  kind     0: the bytes as they are
                 1: a table (see `tables`), u32 word_count, u32 states[lanes], u16 words[word_count]
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np

from astraflow.codec import kernels, rans
from astraflow.codec.chunks import chunk_invalid
from astraflow.codec.rans import FrequencyTables, cost_bits, read_tables
from astraflow.codec.shared_tables import field_of
from astraflow.core.tensors import Dtype

_RAW, _CODED = 0, 1
_COUNT: Final = struct.Struct("<I")


def encode(dtype: Dtype, bits: np.ndarray) -> bytes:
    planes, histograms = _split(dtype, bits)
    parts = (_encode_plane(planes[place], histograms[place]) for place in _places(dtype))
    return b"".join(chain.from_iterable(parts))


def decode(dtype: Dtype, payload: bytes | memoryview, element_count: int) -> np.ndarray:
    """Return the bits of a range: uN[element_count].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself.
    """
    data = memoryview(payload)
    planes: list[np.ndarray] = []
    at = 0
    try:
        for _ in _places(dtype):
            plane, at = _decode_plane(data, at, element_count)
            planes.append(plane)
    except (ValueError, IndexError, struct.error) as error:
        raise chunk_invalid(f"a payload of planes {error}") from None
    if at != len(data):
        raise chunk_invalid("a payload of planes has bytes behind its end")
    return _joined(dtype, planes[::-1])


def _places(dtype: Dtype) -> Sequence[int]:
    """Return the bytes of an element, the most significant first."""
    return range(dtype.itemsize - 1, -1, -1)


def _split(dtype: Dtype, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return planes u8[itemsize, n], and how often each byte occurs: i64[itemsize, 256]."""
    is_float, level = field_of(dtype)[1] > 0, kernels.level()
    if level < 0:
        rotated = _rotated(bits, 1) if is_float else bits
        planes = np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, dtype.itemsize).T)
        return planes, np.stack([np.bincount(each, minlength=256) for each in planes])
    planes = np.empty((dtype.itemsize, len(bits)), np.uint8)
    histograms = np.empty((dtype.itemsize, 256), np.uint32)
    kernels.loops.split_planes(level, bits, dtype.itemsize, is_float, planes, histograms)
    return planes, histograms.astype(np.int64)


def _joined(dtype: Dtype, planes: Sequence[np.ndarray]) -> np.ndarray:
    is_float, level = field_of(dtype)[1] > 0, kernels.level()
    if level < 0:
        bits = np.stack(planes, 1).view(dtype.bits).reshape(-1)
        return _rotated(bits, 8 * dtype.itemsize - 1) if is_float else bits
    bits = np.empty(len(planes[0]), dtype.bits)
    kernels.loops.join_planes(level, planes, dtype.itemsize, is_float, bits)
    return bits


def _encode_plane(symbols: np.ndarray, histogram: np.ndarray) -> Sequence[bytes | memoryview]:
    tables = FrequencyTables.of(histogram[None])
    # What saves less than a sixteenth is not worth its time.
    if 16 * cost_bits(histogram, tables.frequencies[0]) >= 15 * 8 * len(symbols):
        return bytes((_RAW,)), symbols.data
    coded = rans.encode(symbols, _run(len(symbols)), tables)
    if coded is None:
        raise AssertionError("the table was made of these symbols")
    states, words = coded
    count = _COUNT.pack(len(words) // 2)
    return bytes((_CODED,)), tables.to_bytes(), count, states, words


def _decode_plane(data: memoryview, at: int, element_count: int) -> tuple[np.ndarray, int]:
    kind, at = data[at], at + 1
    if kind == _RAW:
        end = at + element_count
        return np.frombuffer(data[at:end], np.uint8, element_count), end
    if kind != _CODED:
        raise ValueError(f"has a plane of kind {kind}, which is not known")
    tables, nbytes = read_tables(data[at:], 1)
    at += nbytes
    (word_count,) = _COUNT.unpack_from(data, at)
    states = at + _COUNT.size
    words = states + 4 * rans.lane_count(element_count)
    end = words + 2 * word_count
    if end > len(data):
        raise ValueError("is cut off")
    return rans.decode(data[states:words], data[words:end], _run(element_count), tables), end


def _run(count: int) -> rans.SymbolRuns:
    return rans.SymbolRuns.of(np.array([count]), np.zeros(1, np.int64))


def _rotated(bits: np.ndarray, left: int) -> np.ndarray:
    kind, width = bits.dtype.type, 8 * bits.itemsize
    return (bits << kind(left)) | (bits >> kind(width - left))
