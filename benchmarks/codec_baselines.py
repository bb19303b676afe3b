"""What others publish: formats that the weight codec is compared with, by numpy and Zstandard.

Each is lossless. None has digests of its own; `codec.py` times it as it is, and with BLAKE3 over
all that is sent, at both ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import zstandard

Parts = Sequence[Any]
"""What is sent: bytes and arrays."""


class Baseline(Protocol):
    """A format for what changed between two versions: u16[n] each."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> Parts:
        """Return what is sent."""
        ...

    def apply(self, parts: Parts, state: np.ndarray) -> None:
        """Make the new version of the old one, in place."""
        ...


class Published:
    """Positions and raw values."""

    def __init__(self, index: str) -> None:
        """Write positions as numbers of some type."""
        self.index = index

    def encode(self, old: np.ndarray, new: np.ndarray) -> Parts:
        """Return positions and values."""
        places = np.flatnonzero(old != new)
        return places.astype(self.index), new[places]

    def apply(self, parts: Parts, state: np.ndarray) -> None:
        """Write the values."""
        state[np.asarray(parts[0])] = parts[1]


class Gaps:
    """Distances between positions in LEB128, and raw values, packed each on its own."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> Parts:
        """Return two Zstandard frames."""
        places = np.flatnonzero(old != new)
        steps = np.diff(places, prepend=-1) - 1
        compressor = zstandard.ZstdCompressor(level=1)
        return [compressor.compress(each) for each in (leb128(steps).data, new[places].data)]

    def apply(self, parts: Parts, state: np.ndarray) -> None:
        """Write the values."""
        decompressor = zstandard.ZstdDecompressor()
        stream, values = (decompressor.decompress(bytes(each)) for each in parts)
        places = np.cumsum(from_leb128(np.frombuffer(stream, np.uint8)) + 1) - 1
        state[places] = np.frombuffer(values, state.dtype)


class Xor:
    """Both versions XORed, and packed."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> Parts:
        """Return one Zstandard frame."""
        return [zstandard.ZstdCompressor(level=1).compress((old ^ new).data)]

    def apply(self, parts: Parts, state: np.ndarray) -> None:
        """XOR it into the state; doing so twice leads back."""
        stream = zstandard.ZstdDecompressor().decompress(bytes(parts[0]))
        state ^= np.frombuffer(stream, state.dtype)


BASELINES: Mapping[str, Baseline] = {
    "uint32 + raw": Published("uint32"),
    "uint64 + raw": Published("uint64"),
    "gaps + raw, zstd-1": Gaps(),
    "xor, zstd-1": Xor(),
}


def leb128(numbers: np.ndarray) -> np.ndarray:
    """Write numbers, i64[n] from 0 on: u8[m]."""
    widths = np.ones(len(numbers), np.int64)
    for bits in range(7, 63, 7):
        if not (is_wide := numbers >> bits > 0).any():
            break
        widths += is_wide
    ends = np.cumsum(widths)
    stream = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    for place in range(int(widths.max(initial=0))):
        has = widths > place
        goes_on = (widths[has] > place + 1) << 7
        stream[ends[has] - widths[has] + place] = numbers[has] >> 7 * place & 127 | goes_on
    return stream


def from_leb128(stream: np.ndarray) -> np.ndarray:
    """Read numbers, i64[n]."""
    ends = np.flatnonzero(stream < 128) + 1
    starts = np.concatenate(([0], ends[:-1]))
    numbers = np.zeros(len(ends), np.int64)
    for place in range(int((ends - starts).max(initial=0))):
        has = np.flatnonzero(ends - starts > place)
        numbers[has] |= (stream[starts[has] + place].astype(np.int64) & 127) << 7 * place
    return numbers
