"""Encoding: two versions become chunks. Canonical: the same two give the same bytes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import zstandard

from astraflow.codec import sparse_fast
from astraflow.codec.chunks import (
    Chunk,
    ChunkHeader,
    ChunkRange,
    Compression,
    Encoding,
    ranges_of,
)
from astraflow.core.layout import Layout

ZSTD_LEVEL = 1


def encode_patch(layout: Layout, target: np.ndarray, base: np.ndarray | None) -> tuple[Chunk, ...]:
    """Return the chunks that lead from `base` to `target`, each in its smallest encoding.

    Neighbouring ranges that did not change are one chunk without a payload, so that what does
    not change costs next to nothing.

    Args:
        layout: Of both.
        target: u8[nbytes], the new flat state.
        base: u8[nbytes], the old one; None: from nothing, every range is dense.
    """
    drafts = _merge_unchanged(_encode_range(each, target, base) for each in ranges_of(layout))
    return tuple(
        Chunk(header=replace(header, index=index), payload=payload)
        for index, (header, payload) in enumerate(drafts)
    )


Draft = tuple[ChunkHeader, bytes]


def _encode_range(where: ChunkRange, target: np.ndarray, base: np.ndarray | None) -> Draft:
    part = slice(where.offset, where.offset + where.nbytes)
    if base is None:
        return _draft(where, Encoding.DENSE, target[part].tobytes())
    new = target[part].view(where.dtype.bits)
    old = base[part].view(where.dtype.bits)
    indices = np.flatnonzero(new != old)
    if not len(indices):
        return _draft(where, Encoding.UNCHANGED, b"")
    # A change costs at least a byte of gap and one of distance before the entropy stage, which
    # takes at most about a third off: no need to try when nearly everything changed.
    if len(indices) < len(new) * where.dtype.itemsize * 0.75:
        raw = sparse_fast.encode(indices, old[indices], new[indices])
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)
        payload, compression = min(
            ((packed, Compression.ZSTD), (raw, Compression.NONE)), key=lambda pair: len(pair[0])
        )
        if len(payload) < where.nbytes:
            return _draft(where, Encoding.SPARSE_FAST, payload, compression, len(indices))
    return _draft(where, Encoding.DENSE, target[part].tobytes())


def _draft(
    where: ChunkRange,
    encoding: Encoding,
    payload: bytes,
    compression: Compression = Compression.NONE,
    changed_count: int = 0,
) -> Draft:
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
    return header, payload


def _merge_unchanged(drafts: Iterator[Draft]) -> Iterator[Draft]:
    held: ChunkHeader | None = None
    for header, payload in drafts:
        if held is not None and _continues(held, header):
            held = replace(held, nbytes=held.nbytes + header.nbytes)
            continue
        if held is not None:
            yield held, b""
            held = None
        if header.encoding is Encoding.UNCHANGED:
            held = header
        else:
            yield header, payload
    if held is not None:
        yield held, b""


def _continues(held: ChunkHeader, header: ChunkHeader) -> bool:
    return (
        header.encoding is Encoding.UNCHANGED
        and header.dtype is held.dtype
        and header.offset == held.offset + held.nbytes
    )
