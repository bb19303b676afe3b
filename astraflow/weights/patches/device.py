"""The codec's FAST profile by torch operations, where the weights are: the same bytes as on a CPU.

Elements are tensors of signed integers of their size (`weights.view(torch.int16)` for bf16;
`torch.uint8` will do for one byte). What leaves the device are the streams of what changed;
Zstandard packs them on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from astraflow.codec.chunks import (
    Chunk,
    ChunkRange,
    Compression,
    Encoding,
    Runs,
    merge_unchanged,
    numbered,
)
from astraflow.codec.encode import EncodedPatch, EncodedRange, fast_limit, fast_range
from astraflow.codec.sparse_fast import ESCAPE, FastScan, Stream, Streams, read_streams
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason

DeviceBits = Callable[[ChunkRange], torch.Tensor]
"""Gives the elements of a range: iN[element_count]."""

_MASK: Final = (1 << 64) - 1
# Constants of the state digest, as signed integers; see `codec.state_digest`.
_KEY, _A, _B, _M1, _M2, _M3 = (
    value - (value >> 63 << 64)
    for value in (
        0x6173747261666C77,
        0x9E3779B97F4A7C15,
        0xD6E8FEB86659FD93,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xFF51AFD7ED558CCD,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceChange:
    """Elements of a range that change.

    Attributes:
        indices: i64[n], rising, from the start of the range.
        before: iN[n], the bits that they had.
        values: iN[n], the bits that they get.
    """

    indices: torch.Tensor
    before: torch.Tensor
    values: torch.Tensor

    def apply(self, bits: torch.Tensor) -> None:
        """Write the new bits into a range: iN[element_count]. Doing so twice is harmless."""
        bits[self.indices] = self.values

    def sums(self, first: int) -> tuple[int, int]:
        """Return what the change adds to the sums of the state digest, modulo 2^64.

        Args:
            first: Position of the range's first element: byte offset divided by element size.
        """
        offsets = (self.indices + first) * self.values.element_size()
        after, before = _mixed(offsets, self.values), _mixed(offsets, self.before)
        low, high = (int((new - old).sum()) & _MASK for new, old in zip(after, before, strict=True))
        return low, high


def encode_patch_on_device(
    runs: Runs, target: DeviceBits, base: DeviceBits, digest: StateDigest
) -> EncodedPatch:
    """Return what `codec.encode.encode_patch` returns, of bits on a device.

    Args:
        runs: Of the layout of both, or of a part of it.
        target: The new state.
        base: The old one.
        digest: Of the old one.
    """
    encoded = [encode_range_on_device(each, target(each), base(each)) for each in runs.ranges()]
    low, high = sum(each.low for each in encoded), sum(each.high for each in encoded)
    chunks = numbered(merge_unchanged(each.chunk for each in encoded))
    return EncodedPatch(chunks=chunks, digest=digest.plus_sums(low, high))


def encode_range_on_device(where: ChunkRange, new: torch.Tensor, old: torch.Tensor) -> EncodedRange:
    """Return what `codec.encode.encode_fast` returns: iN[element_count] each."""
    change = _difference(new, old)
    low, high = change.sums(where.first)
    streams = _streams(change, fast_limit(where))
    found = FastScan(changed_count=len(change.indices), low=low, high=high, streams=streams)
    return fast_range(where, found, lambda: _to_bytes(new))


def decode_change_on_device(chunk: Chunk, old: torch.Tensor) -> DeviceChange:
    """Return what a chunk of the profile FAST changes; nothing: no indices.

    Args:
        chunk: Its header was checked against the layout and its digest verified.
        old: iN[element_count], the bits of its range in the base.

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or its header.
    """
    try:
        return _decode(chunk, old)
    except ValueError as error:
        index = chunk.header.index
        raise AstraflowError(Reason.CHUNK_INVALID, f"chunk {index} {error}") from None


def _decode(chunk: Chunk, old: torch.Tensor) -> DeviceChange:
    header = chunk.header
    if len(chunk.payload) != header.payload_nbytes or header.compression != Compression.NONE:
        raise ValueError("is not as its header says")
    match header.encoding:
        case Encoding.UNCHANGED:
            return _difference(old, old)
        case Encoding.DENSE:
            new = _from_bytes(chunk.payload, old)
            if len(new) != len(old):
                raise ValueError("has another number of elements than its range")
            return _difference(new, old)
        case Encoding.SPARSE_FAST:
            return _decode_sparse(chunk, old)
        case _:
            raise ValueError(f"is {header.encoding}, which is decoded on the host")


def _difference(new: torch.Tensor, old: torch.Tensor) -> DeviceChange:
    indices = (new != old).nonzero().reshape(-1)
    return DeviceChange(indices=indices, before=old[indices], values=new[indices])


def _streams(change: DeviceChange, limit_nbytes: int) -> Streams | None:
    less = _folded(change.before, change.values) - 1
    steps = _shifted(less, 1)
    marks = steps > 0
    steps = steps[marks]
    is_far = steps >= ESCAPE
    streams = (
        _encode_gaps(change.indices),
        _packed_bits(less & 1),
        _packed_bits(marks.long()),
        torch.where(is_far, ESCAPE, steps).to(torch.uint8),
        steps[is_far].to(change.values.dtype),
    )
    if sum(each.numel() * each.element_size() for each in streams) > limit_nbytes:
        return None
    return Streams(*map(_to_bytes, streams))


def _encode_gaps(indices: torch.Tensor) -> torch.Tensor:
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    full = gaps // ESCAPE
    ends = torch.arange(len(gaps), device=gaps.device) + full.cumsum(0)
    length = int(ends[-1]) + 1 if len(ends) else 0
    stream = torch.full((length,), ESCAPE, dtype=torch.uint8, device=gaps.device)
    stream[ends] = (gaps - full * ESCAPE).to(torch.uint8)
    return stream


def _decode_sparse(chunk: Chunk, old: torch.Tensor) -> DeviceChange:
    count = chunk.header.changed_count
    streams = read_streams(
        chunk.payload, len(old), itemsize=old.element_size(), changed_count=count
    )
    indices = _decode_gaps(_bytes_on(streams.gaps, old), count, len(old))
    less, marks = (_unpacked_bits(_bytes_on(each, old), count) for each in streams[1:3])
    is_marked = marks.bool()
    less[is_marked] |= _decode_steps(streams, old, less[is_marked]) << 1
    before = old[indices]
    return DeviceChange(indices=indices, before=before, values=_moved(before, less + 1))


def _decode_steps(streams: Streams, old: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    steps = _bytes_on(streams.steps, old).long()
    far, is_far = _unsigned(_from_bytes(streams.escapes, old)), steps == ESCAPE
    if len(steps) != len(ups) or int(is_far.sum()) != len(far):
        raise ValueError("has another number of steps than it says")
    # Numbers of 64 bits that look negative are beyond the largest step as well.
    most = (1 << 8 * old.element_size() - 1) - 1 - ups
    if not bool((steps != 0).all()) or bool((far < ESCAPE).any()):
        raise ValueError("is not canonical")
    steps[is_far] = far
    if bool((steps > most).any()):
        raise ValueError("is not canonical")
    return steps


def _packed_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits (0 or 1, i64[n]), the first one lowest: u8[(n + 7) / 8]."""
    octets = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    return (octets << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)


def _unpacked_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    bits = packed.long().reshape(-1, 1) >> torch.arange(8, device=packed.device) & 1
    bits = bits.reshape(-1)
    if bool(bits[count:].any()):
        raise ValueError("is not canonical")
    return bits[:count].clone()


def _decode_gaps(stream: torch.Tensor, count: int, element_count: int) -> torch.Tensor:
    ends = (stream != ESCAPE).nonzero().reshape(-1)
    if len(ends) != count or (len(stream) and (not count or int(ends[-1]) != len(stream) - 1)):
        raise ValueError("has another number of gaps than of changes")
    indices = stream.long().cumsum(0)[ends] + torch.arange(count, device=stream.device)
    if count and int(indices[-1]) >= element_count:
        raise ValueError("changes an element beyond its range")
    return indices


def _folded(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return folded distances as i64[n]; those of 64 bits may look negative."""
    spare = 64 - 8 * old.element_size()
    distance = (_ordered(new) - _ordered(old)) << spare >> spare
    return (distance << 1) ^ (distance >> 63)


def _moved(start: torch.Tensor, folded: torch.Tensor) -> torch.Tensor:
    spare, lowest = 64 - 8 * start.element_size(), -(1 << 8 * start.element_size() - 1)
    distance = _shifted(folded, 1) ^ -(folded & 1)
    ordered = (_ordered(start) + distance) << spare >> spare
    return torch.where(ordered >= 0, ~ordered, ordered ^ lowest).to(start.dtype)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Return where bits stand in the order of `codec.ordering`, modulo 2^N: i64[n]."""
    wide = _signed(bits).long()
    return torch.where(wide < 0, ~wide, wide ^ -(1 << 8 * bits.element_size() - 1))


def _mixed(offsets: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what elements contribute to both sums of the state digest: i64[n] each."""
    x = offsets * _A + _unsigned(bits) * _B + _KEY
    x = (x ^ _shifted(x, 30)) * _M1
    x = (x ^ _shifted(x, 27)) * _M2
    low = x ^ _shifted(x, 31)
    high = (low ^ _shifted(low, 33)) * _M3
    return low, high ^ _shifted(high, 29)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << 64 - count) - 1)


def _unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Return bits as i64[n]; those of 64 bits may look negative."""
    size = bits.element_size()
    return _signed(bits).long() & ((1 << 8 * size) - 1 if size < 8 else -1)


def _signed(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.int8) if bits.dtype is torch.uint8 else bits


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _bytes_on(data: Stream, like: torch.Tensor) -> torch.Tensor:
    # A writable copy, which torch asks for.
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return held.to(like.device)


def _from_bytes(data: Stream, like: torch.Tensor) -> torch.Tensor:
    if len(data) % like.element_size():
        raise ValueError("cuts through an element")
    return _bytes_on(data, like).view(like.dtype)
