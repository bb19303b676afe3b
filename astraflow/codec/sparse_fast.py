"""SPARSE_FAST: what changed in a range, as `fast_streams`.

The loops are compiled; where they are not, numpy does the same.
"""

from dataclasses import dataclass

import numpy as np

from astraflow.codec import kernels
from astraflow.codec.changes import Found
from astraflow.codec.fast_streams import ESCAPE, Stream, Streams, read_streams
from astraflow.codec.ordering import folded_distances, moved, moved_back
from astraflow.codec.room import empty_changes
from astraflow.core.errors import AstraflowError, Reason


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
    count, low, high, found = kernels.loops.encode_fast(
        kernels.level(), old, new, old.itemsize, first, limit_nbytes
    )
    streams = None if found is None else Streams(*found)
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
    """Return what a range was before it changed: gaps and steps lead both ways.

    Args:
        payload: As `Streams.payload` made it.
        new: Bits (uN[element_count]) of the whole range in the target.
        changed_count: From the chunk's header.

    Returns:
        u32[n] rising indices, and the old bits uN[n].

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or the range.
    """
    found = _decode(payload, new, changed_count, 0, is_back=True)
    return found.indices, found.values


def _decode(
    payload: bytes | memoryview, start: np.ndarray, changed_count: int, first: int, *, is_back: bool
) -> Found:
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
        raise AstraflowError(Reason.CHUNK_INVALID, f"a sparse payload {error}") from None
    return Found(indices, before, values, sums)


def _decode_streams(streams: Streams, start: np.ndarray, count: int, *, is_back: bool) -> Found:
    indices = _decode_gaps(np.frombuffer(streams.gaps, np.uint8), count, len(start))
    ups, marks = (_decode_bits(each, count) for each in (streams.ups, streams.marks))
    # Twice the units above one, the direction in the lowest bit: a folded distance less one.
    less = ups.astype(start.dtype)
    less[marks] |= _decode_steps(streams, less[marks]) << start.dtype.type(1)
    move = moved_back if is_back else moved
    values = move(start[indices], less + start.dtype.type(1))
    return Found(indices, start[indices], values)


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
