"""Encoding: two versions become chunks. Canonical: the same two give the same bytes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import zstandard

from astraflow.codec import sparse_fast
from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding, Profile
from astraflow.codec.runs import ChunkRange
from astraflow.codec.state_digest import StateDigest

_ZSTD_LEVEL = 1

RangeBits = Callable[[ChunkRange], np.ndarray]
"""Gives the bits of a range, uN[element_count]: a view, or valid until the next call."""


class Ranges(Protocol):
    """What is encoded: a layout, or a part of one."""

    def ranges(self) -> Iterator[ChunkRange]:
        """Yield its ranges, by offset."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A patch from nothing.

    Attributes:
        chunks: By index.
        shared_tables: What all of them are decoded with; may be empty.
    """

    chunks: tuple[Chunk, ...]
    shared_tables: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPatch:
    """A patch from a base.

    Attributes:
        chunks: By index.
        shared_tables: What all of them are decoded with; may be empty.
        digest: Of the state that it leads to.
    """

    chunks: tuple[Chunk, ...]
    shared_tables: bytes = b""
    digest: StateDigest


def flat_bits(flat: np.ndarray) -> RangeBits:
    """Return what gives views of a flat state: u8[nbytes]."""
    return lambda where: flat[where.bytes].view(where.dtype.bits)


def encode_patch(
    runs: Ranges,
    target: RangeBits,
    base: RangeBits,
    digest: StateDigest,
    *,
    profile: Profile = Profile.FAST,
) -> EncodedPatch:
    """Return the patch that leads from `base` to `target`.

    Every range takes its cheapest encoding by the rule in docs/weights.md. Neighbouring ranges
    that did not change are one chunk without a payload.

    Args:
        runs: Of the layout of both, or of a part of it.
        target: The new state.
        base: The old one.
        digest: Of the old one.
        profile: How it is coded.
    """
    del profile
    chunks: list[Chunk] = []
    for where in runs.ranges():
        new = target(where)
        change = compare(where, new, base(where))
        if change is not None:
            digest = digest.after(change)
        chunks.append(_encode_range(where, new, change))
    return EncodedPatch(chunks=_numbered(_merge_unchanged(chunks)), digest=digest)


def encode_whole(runs: Ranges, target: RangeBits, *, profile: Profile = Profile.FAST) -> Encoded:
    """Return the patch that leads from nothing to `target`.

    Args:
        runs: Of its layout, or of a part of it.
        target: The state; payloads of the profile FAST look into what it returns.
        profile: How it is coded.
    """
    chunks = (encode_chunk(each, target(each), None, profile=profile) for each in runs.ranges())
    return Encoded(chunks=_numbered(chunks))


def encode_chunk(
    where: ChunkRange,
    new: np.ndarray,
    old: np.ndarray | None,
    *,
    profile: Profile = Profile.FAST,
    tables: bytes = b"",
) -> Chunk:
    """Encode one range alone: the chunk that a patch has there, but for its index.

    Neighbouring ranges that did not change are one chunk in a patch.

    Args:
        where: The range.
        new: uN[element_count], its bits.
        old: uN[element_count], its bits in the base; None: from nothing.
        profile: Of the patch.
        tables: Its `shared_tables`.
    """
    del profile, tables
    if old is None:
        return _chunk(where, Encoding.DENSE, new.view(np.uint8).data)
    return _encode_range(where, new, compare(where, new, old))


def compare(where: ChunkRange, new: np.ndarray, old: np.ndarray) -> Change | None:
    """Return what differs between the bits of a range, uN[n] each; None: nothing."""
    indices = np.flatnonzero(new != old)
    if not len(indices):
        return None
    return Change(
        dtype=where.dtype,
        positions=indices + where.first,
        before=old[indices],
        values=new[indices],
    )


def _encode_range(where: ChunkRange, new: np.ndarray, change: Change | None) -> Chunk:
    if change is None:
        return _chunk(where, Encoding.UNCHANGED, b"")
    # A copy: a patch outlives the state that it was cut from.
    return _encode_sparse(where, change) or _chunk(where, Encoding.DENSE, new.tobytes())


def _encode_sparse(where: ChunkRange, change: Change) -> Chunk | None:
    """Return None where raw bytes are cheaper, or surely not worth the try."""
    limit = where.nbytes * 5 // 4
    # Every change costs a byte of gap and one of distance.
    if 2 * len(change.positions) > limit:
        return None
    indices = change.positions - where.first
    raw = sparse_fast.encode(indices, change.before, change.values, limit_nbytes=limit)
    if raw is None:
        return None
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(raw)
    is_packed = len(packed) < len(raw)
    payload = packed if is_packed else raw
    if len(payload) >= where.nbytes:
        return None
    compression = Compression.ZSTD if is_packed else Compression.NONE
    return _chunk(where, Encoding.SPARSE_FAST, payload, compression, len(indices))


def _chunk(
    where: ChunkRange,
    encoding: Encoding,
    payload: bytes | memoryview,
    compression: Compression = Compression.NONE,
    changed_count: int = 0,
) -> Chunk:
    header = ChunkHeader(
        index=0,
        offset=where.offset,
        nbytes=where.nbytes,
        dtype=where.dtype,
        encoding=encoding,
        compression=compression,
        payload_nbytes=len(payload),
        changed_count=changed_count,
    )
    return Chunk(header=header, payload=payload)


def _merge_unchanged(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    held: Chunk | None = None
    for chunk in chunks:
        if held is not None and _continues(held.header, chunk.header):
            nbytes = held.header.nbytes + chunk.header.nbytes
            held = Chunk(header=replace(held.header, nbytes=nbytes))
            continue
        if held is not None:
            yield held
        held = chunk
    if held is not None:
        yield held


def _continues(held: ChunkHeader, header: ChunkHeader) -> bool:
    return (
        held.encoding is Encoding.UNCHANGED
        and header.encoding is Encoding.UNCHANGED
        and header.dtype is held.dtype
        and header.offset == held.end
    )


def _numbered(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(header=replace(chunk.header, index=index), payload=chunk.payload)
        for index, chunk in enumerate(chunks)
    )
