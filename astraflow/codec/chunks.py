"""Chunks: what is verified, staged, forwarded and resumed, and how a layout is cut into them."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, pairwise
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile

Profile = CodecProfile
"""How a patch is coded: quickly or small."""

CODEC_VERSION: Final = 3
"""Of the byte format in docs/codec.md; raised when a reader has to change."""

CHUNK_NBYTES: Final = 4 << 20
"""Largest payload, and the grid by which layouts are cut."""

MAX_RANGE_NBYTES: Final = 64 << 20
"""Largest range of a chunk that has a payload."""


def chunk_invalid(why: str) -> AstraflowError:
    """Return the error of what no sound source sends, or keeps."""
    return AstraflowError(Reason.CHUNK_INVALID, why)


class Encoding(StrEnum):
    """How a payload describes its range."""

    UNCHANGED = "unchanged"
    DENSE = "dense"
    DENSE_PLANES = "dense_planes"
    SPARSE_FAST = "sparse_fast"
    SPARSE_COMPACT = "sparse_compact"


class Compression(StrEnum):
    """What is applied to the payload as a whole."""

    NONE = "none"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Bytes `[offset, offset + nbytes)` of a layout, all of one dtype."""

    offset: int
    nbytes: int
    dtype: Dtype

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def element_count(self) -> int:
        return self.nbytes // self.dtype.itemsize

    @property
    def first(self) -> int:
        """Position of its first element: byte offset divided by the element size."""
        return self.offset // self.dtype.itemsize

    @property
    def bytes(self) -> slice:
        """Where it lies in the flat state."""
        return slice(self.offset, self.end)

    def cut(self) -> "Iterator[ChunkRange]":
        """Cut it every 4 MiB; the last part may be shorter."""
        for offset in range(self.offset, self.end, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, self.end - offset)
            yield ChunkRange(offset=offset, nbytes=nbytes, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader(ChunkRange):
    """What precedes the payload of a range; see `weights/v1/patch.proto`.

    Attributes:
        index: 0 .. chunk_count - 1; ranges rise with it.
        encoding: How the payload describes it.
        compression: Of the payload.
        payload_nbytes: As sent.
        changed_count: Elements whose bits differ from the base; sparse encodings only.
    """

    index: int
    encoding: Encoding
    compression: Compression = Compression.NONE
    payload_nbytes: int = 0
    changed_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A header and its payload; a raw one may look into the state that it was cut from."""

    header: ChunkHeader
    payload: bytes | memoryview = b""


class Runs:
    """The runs of a layout: neighbouring tensors of one dtype, from the first to the last byte.

    The padding between two tensors of a run belongs to it, and is zero in every version.
    """

    def __init__(self, layout: Layout) -> None:
        self._runs = tuple(_runs(layout))
        self._offsets = [run.offset for run in self._runs]

    def ranges(self) -> Iterator[ChunkRange]:
        """Cut every run into ranges of 4 MiB; its last one may be shorter."""
        return chain.from_iterable(run.cut() for run in self._runs)

    def check(self, header: ChunkHeader) -> None:
        """Refuse a header that cannot be true, before anything is decoded.

        Raises:
            AstraflowError: CHUNK_INVALID.
        """
        fault = self._fault(header)
        if fault:
            raise chunk_invalid(f"chunk {header.index}: {fault}")

    def check_cover(self, headers: Sequence[ChunkHeader]) -> None:
        """Refuse checked headers, by index, that do not rise or leave out a part of the layout.

        Raises:
            AstraflowError: CHUNK_INVALID.
        """
        for before, after in pairwise(headers):
            if after.offset < before.end:
                raise chunk_invalid(f"chunk {after.index}: its range begins inside the last")
        missing = sum(run.nbytes for run in self._runs) - sum(each.nbytes for each in headers)
        if missing:
            raise chunk_invalid(f"the patch says nothing about {missing} bytes")

    def _fault(self, header: ChunkHeader) -> str | None:
        if header.nbytes <= 0 or not self._has(header):
            return f"its range is not inside tensors of {header.dtype}"
        if header.offset % header.dtype.itemsize or header.nbytes % header.dtype.itemsize:
            return f"its range cuts through an element of {header.dtype}"
        if header.encoding is Encoding.UNCHANGED:
            is_empty = not header.payload_nbytes and header.compression is Compression.NONE
            fault = None if is_empty else "an unchanged range has no payload"
        elif not 0 < header.payload_nbytes <= CHUNK_NBYTES or header.nbytes > MAX_RANGE_NBYTES:
            fault = "it is larger than a chunk may be, or empty"
        else:
            fault = None
        is_sparse = header.encoding in (Encoding.SPARSE_FAST, Encoding.SPARSE_COMPACT)
        if not int(is_sparse) <= header.changed_count <= is_sparse * header.element_count:
            return f"it cannot have {header.changed_count} changes"
        return fault

    def _has(self, header: ChunkHeader) -> bool:
        at = bisect_right(self._offsets, header.offset) - 1
        if at < 0:
            return False
        run = self._runs[at]
        return run.dtype is header.dtype and header.end <= run.end


def _runs(layout: Layout) -> Iterator[ChunkRange]:
    held: ChunkRange | None = None
    for spec in layout.tensors:
        if not spec.nbytes:
            continue
        if held is not None and held.dtype is not spec.dtype:
            yield held
            held = None
        offset = spec.offset if held is None else held.offset
        nbytes = spec.offset + spec.nbytes - offset
        held = ChunkRange(offset=offset, nbytes=nbytes, dtype=spec.dtype)
    if held is not None:
        yield held


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
        payload_nbytes=len(payload),
        changed_count=changed_count,
    )
    return Chunk(header=header, payload=payload)


def merge_unchanged(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Make one chunk of neighbours that did not change."""
    held: Chunk | None = None
    for chunk in chunks:
        before, header = held and held.header, chunk.header
        if (
            before is not None
            and before.encoding is header.encoding is Encoding.UNCHANGED
            and before.dtype is header.dtype
            and before.end == header.offset
        ):
            held = Chunk(header=replace(before, nbytes=before.nbytes + header.nbytes))
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
