"""Chunk lists: ranges become chunks, unchanged neighbours one, numbered in order."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.codec.runs import ChunkRange


def make_chunk(
    where: ChunkRange,
    encoding: Encoding,
    payload: bytes | memoryview = b"",
    *,
    changed_count: int = 0,
) -> Chunk:
    """Return the chunk of a range, not yet numbered."""
    header = ChunkHeader(
        index=0,
        offset=where.offset,
        nbytes=where.nbytes,
        dtype=where.dtype,
        encoding=encoding,
        compression=Compression.NONE,
        payload_nbytes=len(payload),
        changed_count=changed_count,
    )
    return Chunk(header=header, payload=payload)


def merge_unchanged(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Make one chunk of neighbours that did not change."""
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


def numbered(
    chunks: Iterable[Chunk], made: Callable[[Chunk], None] = lambda _: None
) -> tuple[Chunk, ...]:
    """Number chunks in their order.

    Args:
        chunks: Of one patch.
        made: Called with each as soon as it is known.
    """
    found: list[Chunk] = []
    for index, chunk in enumerate(chunks):
        found.append(Chunk(header=replace(chunk.header, index=index), payload=chunk.payload))
        made(found[-1])
    return tuple(found)


def _continues(held: ChunkHeader, header: ChunkHeader) -> bool:
    return (
        held.encoding is Encoding.UNCHANGED
        and header.encoding is Encoding.UNCHANGED
        and header.dtype is held.dtype
        and header.offset == held.end
    )
