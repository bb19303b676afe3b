"""One range becomes one chunk: the cheapest encoding by the rules of docs/weights.md."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from astraflow.codec import dense_planes, kernels, sparse_compact, sparse_fast
from astraflow.codec.chunk_list import make_chunk
from astraflow.codec.chunks import Chunk, Encoding, Profile
from astraflow.codec.runs import ChunkRange
from astraflow.codec.shared_tables import ClassTables
from astraflow.codec.state_digest import changed_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedRange:
    """A chunk, and what its changes add to the sums of the state digest, modulo 2^64."""

    chunk: Chunk
    low: int = 0
    high: int = 0


def encode_fast(where: ChunkRange, new: np.ndarray, old: np.ndarray) -> EncodedRange:
    """Encode what changed, uN[n] each, for the profile FAST."""
    scan = _scan_with_numpy if kernels.level() < 0 else sparse_fast.scan
    found = scan(old, new, first=where.first, limit_nbytes=fast_limit(where))
    return fast_range(where, found, new.tobytes)


def is_sparse(where: ChunkRange, changed_count: int) -> bool:
    """Whether the profile COMPACT tries to code a range by its changes."""
    return 2 * changed_count <= where.element_count


def encode_compact(
    where: ChunkRange, new: np.ndarray, scanned: sparse_compact.Scanned, tables: ClassTables
) -> Chunk:
    """Encode what changed, for the profile COMPACT."""
    if not scanned.changed_count:
        return make_chunk(where, Encoding.UNCHANGED)
    if is_sparse(where, scanned.changed_count):
        payload = sparse_compact.encode(scanned, tables)
        if payload is not None and 2 * len(payload) <= where.nbytes:
            count = scanned.changed_count
            return make_chunk(where, Encoding.SPARSE_COMPACT, payload, changed_count=count)
    return encode_dense(where, new, Profile.COMPACT)


def encode_dense(where: ChunkRange, new: np.ndarray, profile: Profile) -> Chunk:
    """Encode all of a range; a raw payload looks into `new`."""
    if profile is Profile.COMPACT:
        payload = dense_planes.encode(where.dtype, new)
        if len(payload) < where.nbytes:
            return make_chunk(where, Encoding.DENSE_PLANES, payload)
    return make_chunk(where, Encoding.DENSE, new.view(np.uint8).data)


def fast_range(
    where: ChunkRange, found: sparse_fast.Scanned, whole: Callable[[], bytes]
) -> EncodedRange:
    """Choose between what changed and the whole range, for the profile FAST.

    Args:
        where: The range.
        found: What changed.
        whole: Gives a copy of the range: a patch outlives the state that it was cut from.
    """
    return EncodedRange(chunk=_fast_chunk(where, found, whole), low=found.low, high=found.high)


def fast_limit(where: ChunkRange) -> int:
    """Return the most that the streams of a range may have, in bytes."""
    return where.nbytes * 5 // 4


def _fast_chunk(where: ChunkRange, found: sparse_fast.Scanned, whole: Callable[[], bytes]) -> Chunk:
    if not found.changed_count:
        return make_chunk(where, Encoding.UNCHANGED)
    if found.streams is not None:
        payload = found.streams.payload(where.dtype.itemsize)
        if len(payload) < where.nbytes:
            count = found.changed_count
            return make_chunk(where, Encoding.SPARSE_FAST, payload, changed_count=count)
    return make_chunk(where, Encoding.DENSE, whole())


def _scan_with_numpy(
    old: np.ndarray, new: np.ndarray, *, first: int, limit_nbytes: int
) -> sparse_fast.Scanned:
    indices = np.flatnonzero(old != new)
    before, values = old[indices], new[indices]
    low, high = changed_sums(indices + first, before, values)
    return sparse_fast.Scanned(
        changed_count=len(indices),
        low=low,
        high=high,
        streams=sparse_fast.streams_of(indices, before, values, limit_nbytes=limit_nbytes),
    )
