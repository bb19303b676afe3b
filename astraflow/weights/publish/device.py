"""The copy of a publisher where the weights are, and the codec's FAST profile by torch operations.

What is compared never leaves the device: patches have the same bytes as those that are made on the
host, and what crosses to the host are the streams of what changed; Zstandard packs them there, in a
thread, while the device goes on. Neighbouring ranges are compared together, as a span: a device is
as long busy with a launch as with a megabyte. It takes up to a quarter of what is free meanwhile.

Elements are tensors of signed integers of their size (`weights.view(torch.int16)` for bf16), of one
byte `torch.uint8`.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch

from astraflow.codec.chunks import (
    CHUNK_NBYTES,
    Chunk,
    ChunkRange,
    Encoding,
    Runs,
    merge_unchanged,
    numbered,
)
from astraflow.codec.encode import EncodedPatch, EncodedRange, RangeBits, fast_limit, fast_range
from astraflow.codec.sparse_fast import ESCAPE, FastScan, Streams
from astraflow.codec.state_digest import MIXING, StateDigest
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.publish.tensors import TORCH_NAMES, can_round, dtype_of, local_part

DeviceBits = Callable[[ChunkRange], torch.Tensor]
"""Gives the elements of a range, or of neighbouring ones: iN[element_count]."""

_LEAST_SPAN: Final = 64 << 20
_MOST_SPAN: Final = 2 << 30
# In all of a GPU's memory, where nobody said whether there is to be one.
_COPIES: Final = 20
# Of what is free of the device.
_SPAN_SHARE: Final = 8

# Of one scan, unless a range alone has more: it holds some 20 numbers of 8 bytes for each.
_MOST_CHANGES: Final = 4 << 20

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
        self,
        target: DeviceBits,
        digest: StateDigest,
        *,
        made: Callable[[Chunk], None],
    ) -> EncodedPatch:
        """Return the patch to the next version, and make it what is held.

        The target stays as it is until this returns; the digest is of what is held.
        """
        with self._beside():
            encoded = encode_patch_on_device(
                self._part, target, self._bits, digest, device=self.device, made=made
            )
            # Not before: what fails on the way leaves what is held as it was.
            changed = {
                chunk.header.offset
                for chunk in encoded.chunks
                if chunk.header.encoding is not Encoding.UNCHANGED
            }
            for span in _spans(self._part, self.device):
                if any(where.offset in changed for where in span):
                    self._bits(_joined(span)).copy_(target(_joined(span)))
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
        start = self._part.place(where).start
        return self._flat[start : start + where.nbytes].view(_KINDS[where.dtype.itemsize])

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

    @property
    def has_room(self) -> bool:
        """Whether a copy takes a twentieth of the GPU's memory at most, and that is to be had."""
        if self.device is None or self.device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self.device)
        # What torch holds and does not use is had as well.
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        nbytes = self._part.nbytes
        return _COPIES * nbytes <= total and nbytes <= free + held

    def _rounded(self, piece: Any, part: torch.Tensor) -> torch.dtype:
        """Return the type in which a part is published."""
        is_other = dtype_of(part) is not piece.dtype and can_round(part, piece.dtype)
        return getattr(torch, TORCH_NAMES[piece.dtype]) if is_other else part.dtype

    def bits(self, where: ChunkRange) -> torch.Tensor:
        """Return the bits of a range, iN[element_count]: a view where it lies in one tensor."""
        kind, parts = _KINDS[where.dtype.itemsize], list(self._part.parts(where))
        if len(parts) == 1 and parts[0][1] == slice(0, where.element_count):
            ((piece, _, of_piece),) = parts
            part = self._flat[piece.spec.name][of_piece]
            return part.to(self._rounded(piece, part)).view(kind)
        room = torch.zeros(where.element_count, dtype=kind, device=self.device)
        for piece, here, of_piece in parts:
            part = self._flat[piece.spec.name][of_piece]
            room[here].view(self._rounded(piece, part)).copy_(part)
        return room


def encode_patch_on_device(
    runs: Runs,
    target: DeviceBits,
    base: DeviceBits,
    digest: StateDigest,
    *,
    device: torch.device,
    made: Callable[[Chunk], None] = lambda _: None,
) -> EncodedPatch:
    """Return what `codec.encode.encode_patch` returns, of bits on a device."""
    low = high = 0

    def chunks_of() -> Iterator[Chunk]:
        nonlocal low, high
        for each in _encoded(runs, target, base, device):
            low, high = low + each.low, high + each.high
            yield each.chunk

    chunks = numbered(merge_unchanged(chunks_of()), made)
    return EncodedPatch(chunks=chunks, digest=digest.plus_sums(low, high))


def _spans(runs: Runs, device: torch.device) -> Iterator[list[ChunkRange]]:
    """Yield neighbouring ranges, all but the last as large as ranges are."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    most = min(_MOST_SPAN, max(_LEAST_SPAN, free // _SPAN_SHARE))
    span: list[ChunkRange] = []
    for where in runs.ranges():
        is_next = span and (span[-1].end, span[-1].dtype) == (where.offset, where.dtype)
        is_full = len(span) * CHUNK_NBYTES >= most
        if span and (not is_next or is_full or span[-1].nbytes < CHUNK_NBYTES):
            yield span
            span = []
        span.append(where)
    if span:
        yield span


def _joined(span: Sequence[ChunkRange]) -> ChunkRange:
    return replace(span[0], nbytes=span[-1].end - span[0].offset)


def _encoded(
    runs: Runs, target: DeviceBits, base: DeviceBits, device: torch.device
) -> Iterator[EncodedRange]:
    """Yield what `codec.encode.encode_fast` returns of each range; sums of a scan are its first's.

    While a thread packs the streams of a span, the device scans the next one.
    """
    beside = _this_stream()

    def packed(scanned: tuple[ChunkRange, FastScan, torch.Tensor]) -> EncodedRange:
        where, found, new = scanned

        def whole() -> bytes:
            with beside():
                return _to_array(new).tobytes()

        return fast_range(where, found, whole)

    # One: of many packets as small as a range's, more threads contend for the interpreter.
    with ThreadPoolExecutor(1, "codec") as pool:
        waiting: deque[Iterator[EncodedRange]] = deque()
        for span in _spans(runs, device):
            where = _joined(span)
            waiting.append(pool.map(packed, _scans(span, target(where), base(where))))
            if len(waiting) > 1:
                yield from waiting.popleft()
        for each in waiting:
            yield from each


def _scans(
    span: Sequence[ChunkRange], new: torch.Tensor, old: torch.Tensor
) -> Iterator[tuple[ChunkRange, FastScan, torch.Tensor]]:
    """Yield each range of a span with what changed in it and its new elements, iN[n]."""
    size = span[0].element_count
    indices = (new != old).nonzero().reshape(-1)  # i64[n], rising, from the start of the span
    starts = _numbers(torch.searchsorted(indices, _edges(span, new.device) * size))
    first = 0
    while first < len(span):
        last = first + 1
        while last < len(span) and starts[last + 1] - starts[first] <= _MOST_CHANGES:
            last += 1
        some, where = span[first:last], slice(first * size, last * size)
        changed = indices[starts[first] : starts[last]] - where.start
        found = _scan(some, changed, new[where], old[where])
        yield from zip(some, found, _parts(new[where], size), strict=True)
        first = last


def _edges(span: Sequence[ChunkRange], device: torch.device) -> torch.Tensor:
    return torch.arange(len(span) + 1, device=device)


def _parts(elements: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return cast("Any", elements).split(size)


def _numbers(values: torch.Tensor) -> Any:
    """Return integers as lists."""
    return cast("Any", values).tolist()


def _scan(
    span: Sequence[ChunkRange], indices: torch.Tensor, new: torch.Tensor, old: torch.Tensor
) -> list[FastScan]:
    """Return what changed in each range of a span, i64[n] of iN[m] and iN[m]."""
    if not len(indices):
        return [FastScan(changed_count=0, low=0, high=0, streams=None)] * len(span)
    size = span[0].element_count
    before, values = old[indices], new[indices]  # iN[n]
    # What the change adds to the sums of the state digest, modulo 2^64.
    offsets = (indices + span[0].first) * span[0].dtype.itemsize
    pairs = zip(_mixed(offsets, values), _mixed(offsets, before), strict=True)
    sums = torch.stack([(after - was).sum() for after, was in pairs])
    # Which range a change is in, and between which changes each range begins and ends.
    of_range = indices // size
    bounds = torch.searchsorted(of_range, _edges(span, new.device))
    gaps, gap_ends = _encode_gaps(indices, of_range, size, new.numel())
    # Folded distances; those of 64 bits may look negative.
    spare = 64 - 8 * values.element_size()
    distance = (_ordered(values) - _ordered(before)) << spare >> spare
    less = ((distance << 1) ^ (distance >> 63)) - 1
    steps = _shifted(less, 1)
    marks = steps > 0
    masks, mask_bounds = _packed_bits(torch.stack([less & 1, marks]), of_range, bounds)
    steps = steps[marks]
    is_far = steps >= ESCAPE
    step_bounds = _from_zero(marks)[bounds]
    streams = (
        gaps,
        *masks,
        torch.where(is_far, ESCAPE, steps).to(torch.uint8),
        steps[is_far].to(values.dtype),
    )
    at = torch.stack(
        [
            bounds,
            _from_zero(gap_ends, sums=False)[bounds],
            mask_bounds,
            step_bounds,
            _from_zero(is_far)[step_bounds] * values.element_size(),
        ]
    )
    low, high = (each & _MASK for each in _numbers(sums))
    counts, *cuts = _numbers(at)
    cuts.insert(1, cuts[1])
    arrays = [_to_array(each).data for each in streams]
    scans: list[FastScan] = []
    for place, where in enumerate(span):
        parts = (
            array[cut[place] : cut[place + 1]] for array, cut in zip(arrays, cuts, strict=True)
        )
        found = Streams(*parts)
        is_short = found.nbytes <= fast_limit(where)
        scans.append(
            FastScan(
                changed_count=counts[place + 1] - counts[place],
                low=0 if place else low,
                high=0 if place else high,
                streams=found if is_short else None,
            )
        )
    return scans


def _encode_gaps(
    indices: torch.Tensor, of_range: torch.Tensor, size: int, element_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gaps of all ranges, u8, with room behind the last, and where each ends, i64[n]."""
    before = torch.roll(indices, 1)
    is_first = of_range != torch.roll(of_range, 1)
    is_first[0] = True
    gaps = torch.where(is_first, indices - of_range * size, indices - before - 1)
    full = gaps // ESCAPE
    ends = torch.arange(1, len(gaps) + 1, device=gaps.device) + full.cumsum(0)
    room = len(gaps) + element_count // ESCAPE
    stream = torch.full((room,), ESCAPE, dtype=torch.uint8, device=gaps.device)
    stream[ends - 1] = (gaps - full * ESCAPE).to(torch.uint8)
    return stream, ends


def _packed_bits(
    bits: torch.Tensor, of_range: torch.Tensor, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows of bits (0 or 1, [r, n]), the first one lowest, each range from a byte on.

    Returns:
        u8[r, m], with room behind the last byte; where each range begins and ends, i64[ranges + 1].
    """
    byte_bounds = _from_zero((torch.diff(bounds) + 7) // 8)
    order = torch.arange(bits.shape[1], device=bits.device) - bounds[of_range]
    places = order + 8 * byte_bounds[of_range]
    room = bits.shape[1] // 8 + len(bounds)
    octets = torch.zeros((len(bits), 8 * room), dtype=torch.uint8, device=bits.device)
    octets[:, places] = bits.to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    packed = (octets.view(len(bits), room, 8) * weights).sum(2, dtype=torch.uint8)
    return packed, byte_bounds


def _from_zero(counts: torch.Tensor, *, sums: bool = True) -> torch.Tensor:
    """Return the sums of all counts before each, i64[n + 1]; or these are sums already."""
    return torch.nn.functional.pad(counts.cumsum(0) if sums else counts, (1, 0))


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Return where bits stand in the order of `codec.float_bits`, modulo 2^N: i64[n]."""
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


def _this_stream() -> Callable[[], Any]:
    """Return what has another thread work in the stream of this one."""
    if not torch.cuda.is_initialized():
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def _to_array(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).cpu().numpy()
