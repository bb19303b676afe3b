"""Encoding: two versions become chunks. Canonical: the same two give the same bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import zstandard

from astraflow.codec import sparse_fast
from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.codec.runs import ChunkRange, Runs
from astraflow.codec.state_digest import StateDigest

_ZSTD_LEVEL = 1


def encode_patch(
    runs: Runs, target: np.ndarray, base: np.ndarray, digest: StateDigest
) -> tuple[tuple[Chunk, ...], StateDigest]:
    """Return the chunks that lead from `base` to `target`, and the target's state digest.

    Every range takes its cheapest encoding by the rule in docs/weights.md. Neighbouring ranges
    that did not change are one chunk without a payload.

    Args:
        runs: Of the layout of both.
        target: u8[nbytes], the new flat state.
        base: u8[nbytes], the old one.
        digest: Of the old one.
    """
    chunks: list[Chunk] = []
    for where in runs.ranges():
        change = compare(where, target, base)
        if change is not None:
            digest = digest.after(change)
        chunks.append(_encode_range(where, target, change))
    return _numbered(_merge_unchanged(chunks)), digest


def compare(where: ChunkRange, target: np.ndarray, base: np.ndarray) -> Change | None:
    """Return what differs between two flat states in a range; None: nothing."""
    new = target[where.bytes].view(where.dtype.bits)
    old = base[where.bytes].view(where.dtype.bits)
    indices = np.flatnonzero(new != old)
    if not len(indices):
        return None
    return Change(
        dtype=where.dtype,
        positions=indices + where.offset // where.dtype.itemsize,
        before=old[indices],
        values=new[indices],
    )


def encode_whole(runs: Runs, target: np.ndarray) -> tuple[Chunk, ...]:
    """Return the chunks that lead from nothing to `target`; their payloads look into it."""
    return _numbered(
        _chunk(each, Encoding.DENSE, target[each.bytes].data) for each in runs.ranges()
    )


def _encode_range(where: ChunkRange, target: np.ndarray, change: Change | None) -> Chunk:
    if change is None:
        return _chunk(where, Encoding.UNCHANGED, b"")
    # A copy: a patch outlives the state that it was cut from.
    return _encode_sparse(where, change) or _chunk(
        where, Encoding.DENSE, target[where.bytes].tobytes()
    )


def _encode_sparse(where: ChunkRange, change: Change) -> Chunk | None:
    """Return None where raw bytes are cheaper, or surely not worth the try."""
    limit = where.nbytes * 5 // 4
    # Every change costs a byte of gap and one of distance.
    if 2 * len(change.positions) > limit:
        return None
    indices = change.positions - where.offset // where.dtype.itemsize
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
