"""The copy of a publisher where the weights are, and the codec's FAST profile by torch operations.

What is compared never leaves the device: patches have the same bytes as those that are made on the
host, and what crosses to the host are the streams of what changed; Zstandard packs them there.

Elements are tensors of signed integers of their size (`weights.view(torch.int16)` for bf16), of one
byte `torch.uint8`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from astraflow.codec.chunks import Chunk, ChunkRange, Encoding, Runs, merge_unchanged, numbered
from astraflow.codec.encode import EncodedPatch, EncodedRange, RangeBits, fast_limit, fast_range
from astraflow.codec.sparse_fast import ESCAPE, FastScan, Streams
from astraflow.codec.state_digest import MIXING, StateDigest
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.publish.tensors import TORCH_NAMES, can_round, dtype_of, local_part

DeviceBits = Callable[[ChunkRange], torch.Tensor]
"""Gives the elements of a range: iN[element_count]."""

_KINDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MASK: Final = (1 << 64) - 1
# As signed integers.
_KEY, _A, _B, _M1, _M2, _M3 = (int(each.astype(np.int64)) for each in MIXING)


class DeviceCopy:
    """A publisher's copy of its newest version, on a device; the history beside it is on the host.

    All work has a stream of its own, which waits for what was queued when it begins: the optimizer
    step that made the weights. Training goes on beside it until the weights are to change.
    """

    def __init__(self, part: ShardLayout, device: torch.device, newest: RangeBits) -> None:
        """Copy a version from the host, whole: its bits are those that readers have.

        It takes as much memory of the device, where the weights are, as the part has.
        """
        self.device = device
        self._part = part
        self._flat = torch.zeros(part.nbytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self._beside():
            for where in self._part.ranges():
                size = where.dtype.itemsize
                bits = newest(where).view(f"i{size}" if size > 1 else "u1")
                self._bits(where).copy_(torch.as_tensor(bits))

    def encode(
        self, target: DeviceBits, digest: StateDigest, *, made: Callable[[Chunk], None]
    ) -> EncodedPatch:
        """Return the patch to the next version, and make it what is held.

        The target stays as it is until this returns; the digest is of what is held.
        """
        with self._beside():
            encoded = encode_patch_on_device(self._part, target, self._bits, digest, made=made)
            # Not before: what fails on the way leaves what is held as it was.
            changed = {
                chunk.header.offset
                for chunk in encoded.chunks
                if chunk.header.encoding is not Encoding.UNCHANGED
            }
            for where in self._part.ranges():
                if where.offset in changed:
                    self._bits(where).copy_(target(where))
        return encoded

    def digest(self) -> StateDigest:
        """Return what the bits that are held contribute to the state digest; reads all of them."""
        low = high = 0
        with self._beside():
            for where in self._part.ranges():
                bits, first = self._bits(where), where.first
                for _, here, _ in self._part.parts(where):
                    places = torch.arange(here.start, here.stop, device=self.device) + first
                    sums = _mixed(places * where.dtype.itemsize, bits[here])
                    low, high = low + int(sums[0].sum()), high + int(sums[1].sum())
        return StateDigest(low & _MASK, high & _MASK)

    def _bits(self, where: ChunkRange) -> torch.Tensor:
        return self._flat[self._part.place(where)].view(_KINDS[where.dtype.itemsize])

    @contextmanager
    def _beside(self) -> Generator[None]:
        """Work in the stream of this copy, and return when all of it is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class DeviceExport:
    """Reads the tensors of a version where they are, range by range.

    Attributes:
        device: Where all of them are; None: not all on one, or not all of torch.
    """

    def __init__(self, part: ShardLayout, tensors: Mapping[str, Any]) -> None:
        self._part = part
        self._flat: dict[str, torch.Tensor] = {}
        devices: set[torch.device | None] = set()
        for piece in part.pieces:
            spec = piece.spec
            found = local_part(tensors[spec.name], spec)
            if not isinstance(found, torch.Tensor):
                devices.add(None)
                continue
            devices.add(found.device)
            is_whole, flat = tuple(found.shape) == spec.shape, found.detach().reshape(-1)
            first = (piece.offset - spec.offset) // spec.dtype.itemsize if is_whole else 0
            self._flat[spec.name] = flat[first : first + piece.nbytes // spec.dtype.itemsize]
        self.device = devices.pop() if len(devices) == 1 else None

    def bits(self, where: ChunkRange) -> torch.Tensor:
        """Return the bits of a range, iN[element_count]: a view where it lies in one tensor."""
        kind = _KINDS[where.dtype.itemsize]
        room: torch.Tensor | None = None
        for piece, here, of_piece in self._part.parts(where):
            part = self._flat[piece.spec.name][of_piece]
            if dtype_of(part) is not piece.dtype and can_round(part, piece.dtype):
                part = part.to(getattr(torch, TORCH_NAMES[piece.dtype]))
            found = part.view(kind)
            if len(found) == where.element_count:
                return found
            if room is None:
                room = torch.zeros(where.element_count, dtype=kind, device=found.device)
            room[here] = found
        if room is None:
            raise AssertionError("no range lies between the tensors")
        return room


def encode_patch_on_device(
    runs: Runs,
    target: DeviceBits,
    base: DeviceBits,
    digest: StateDigest,
    *,
    made: Callable[[Chunk], None] = lambda _: None,
) -> EncodedPatch:
    """Return what `codec.encode.encode_patch` returns, of bits on a device."""
    low = high = 0

    def chunks_of() -> Iterator[Chunk]:
        nonlocal low, high
        for where in runs.ranges():
            each = encode_range_on_device(where, target(where), base(where))
            low, high = low + each.low, high + each.high
            yield each.chunk

    chunks = numbered(merge_unchanged(chunks_of()), made)
    return EncodedPatch(chunks=chunks, digest=digest.plus_sums(low, high))


def encode_range_on_device(where: ChunkRange, new: torch.Tensor, old: torch.Tensor) -> EncodedRange:
    """Return what `codec.encode.encode_fast` returns: iN[element_count] each."""
    indices = (new != old).nonzero().reshape(-1)  # i64[n], rising, from the start of the range
    before, values = old[indices], new[indices]  # iN[n]
    # What the change adds to the sums of the state digest, modulo 2^64.
    offsets = (indices + where.first) * where.dtype.itemsize
    pairs = zip(_mixed(offsets, values), _mixed(offsets, before), strict=True)
    low, high = (int((after - was).sum()) & _MASK for after, was in pairs)
    streams = _streams(indices, before, values, fast_limit(where))
    found = FastScan(changed_count=len(indices), low=low, high=high, streams=streams)
    return fast_range(where, found, lambda: _to_bytes(new))


def _streams(
    indices: torch.Tensor, before: torch.Tensor, values: torch.Tensor, limit_nbytes: int
) -> Streams | None:
    # Folded distances; those of 64 bits may look negative.
    spare = 64 - 8 * values.element_size()
    distance = (_ordered(values) - _ordered(before)) << spare >> spare
    less = ((distance << 1) ^ (distance >> 63)) - 1
    steps = _shifted(less, 1)
    marks = steps > 0
    steps = steps[marks]
    is_far = steps >= ESCAPE
    streams = (
        _encode_gaps(indices),
        _packed_bits(less & 1),
        _packed_bits(marks.long()),
        torch.where(is_far, ESCAPE, steps).to(torch.uint8),
        steps[is_far].to(values.dtype),
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


def _packed_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits (0 or 1, i64[n]), the first one lowest: u8[(n + 7) / 8]."""
    octets = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    return (octets << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Return where bits stand in the order of `codec.ordering`, modulo 2^N: i64[n]."""
    wide = _signed(bits).long()
    return torch.where(wide < 0, ~wide, wide ^ -(1 << 8 * bits.element_size() - 1))


def _mixed(offsets: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what elements contribute to both sums of the state digest: i64[n] each."""
    size = bits.element_size()
    # Those of 64 bits may look negative.
    unsigned = _signed(bits).long() & ((1 << 8 * size) - 1 if size < 8 else -1)
    x = offsets * _A + unsigned * _B + _KEY
    x = (x ^ _shifted(x, 30)) * _M1
    x = (x ^ _shifted(x, 27)) * _M2
    low = x ^ _shifted(x, 31)
    high = (low ^ _shifted(low, 33)) * _M3
    return low, high ^ _shifted(high, 29)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << 64 - count) - 1)


def _signed(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.int8) if bits.dtype is torch.uint8 else bits


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).cpu().numpy().tobytes()
