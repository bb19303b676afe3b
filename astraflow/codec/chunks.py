"""Chunks: the unit that is verified, staged, forwarded and resumed."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout

CODEC_VERSION = 1

CHUNK_NBYTES = 4 << 20
"""Largest range of one chunk that has a payload: a payload has at most 4 MiB on the wire."""


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
class ChunkHeader:
    """What precedes a payload; see `weights/v1/patch.proto`.

    Attributes:
        index: 0 .. chunk_count - 1; ranges rise with it.
        offset: Of the range in the flat layout, in bytes.
        nbytes: Of the range.
        dtype: Of all elements in the range.
        encoding: How the payload describes it.
        compression: Of the payload.
        payload_nbytes: As sent.
        changed_count: Elements whose bits differ from the base; sparse encodings only.
    """

    index: int
    offset: int
    nbytes: int
    dtype: Dtype
    encoding: Encoding
    compression: Compression = Compression.NONE
    payload_nbytes: int = 0
    changed_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A header and its payload."""

    header: ChunkHeader
    payload: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Bytes `[offset, offset + nbytes)` of a layout, all of one dtype."""

    offset: int
    nbytes: int
    dtype: Dtype


def ranges_of(layout: Layout) -> Iterator[ChunkRange]:
    """Cut a layout into ranges of at most 4 MiB, each inside a run of tensors of one dtype.

    The padding between two tensors of a run lies in its ranges, and is zero in every version.
    """
    for first, end, dtype in _runs(layout):
        for offset in range(first, end, CHUNK_NBYTES):
            yield ChunkRange(offset=offset, nbytes=min(CHUNK_NBYTES, end - offset), dtype=dtype)


def _runs(layout: Layout) -> Iterator[tuple[int, int, Dtype]]:
    """Yield (first byte, end, dtype) of each run of neighbouring tensors of one dtype."""
    start: int | None = None
    end = 0
    dtype: Dtype | None = None
    for spec in layout.tensors:
        if not spec.nbytes:
            continue
        if spec.dtype is not dtype:
            if start is not None and dtype is not None:
                yield start, end, dtype
            start, dtype = spec.offset, spec.dtype
        end = spec.offset + spec.nbytes
    if start is not None and dtype is not None:
        yield start, end, dtype


def check_header(header: ChunkHeader, layout: Layout) -> None:
    """Refuse a chunk whose header cannot be true, before anything is decoded.

    Raises:
        AstraflowError: CHUNK_INVALID.
    """
    itemsize = header.dtype.itemsize
    fault: str | None = None
    if header.offset < 0 or header.nbytes <= 0 or header.offset + header.nbytes > layout.nbytes:
        fault = "its range leaves the layout"
    elif header.offset % itemsize or header.nbytes % itemsize:
        fault = f"its range cuts through an element of {header.dtype}"
    elif not 0 <= header.changed_count <= header.nbytes // itemsize:
        fault = f"{header.changed_count} changes do not fit into its range"
    elif header.encoding is Encoding.UNCHANGED:
        fault = "an unchanged range has no payload" if header.payload_nbytes else None
    elif not 0 <= header.payload_nbytes <= CHUNK_NBYTES or header.nbytes > 16 * CHUNK_NBYTES:
        fault = "it is larger than a chunk may be"
    elif not _inside_one_run(header, layout):
        fault = f"its range is not inside tensors of {header.dtype}"
    if fault:
        raise AstraflowError(Reason.CHUNK_INVALID, f"chunk {header.index}: {fault}")


def _inside_one_run(header: ChunkHeader, layout: Layout) -> bool:
    return any(
        dtype is header.dtype and first <= header.offset and header.offset + header.nbytes <= end
        for first, end, dtype in _runs(layout)
    )
