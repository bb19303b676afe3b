"""Decoding: a chunk and the base become absolute new bits. Applying those twice is harmless."""

from dataclasses import dataclass

import numpy as np
import zstandard

from astraflow.codec import sparse_fast
from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """New bits of some elements of the flat layout.

    Attributes:
        dtype: Of the elements.
        positions: i64[n], rising: byte offset of each divided by the element size.
        values: uN[n], their bits.
    """

    dtype: Dtype
    positions: np.ndarray
    values: np.ndarray


def decode_chunk(chunk: Chunk, base: np.ndarray | None) -> Change | None:
    """Return what a chunk changes in the base; None: nothing.

    Args:
        chunk: Its header was checked and its digest verified.
        base: u8[nbytes], the flat state; None: from nothing.

    Raises:
        AstraflowError: CHUNK_INVALID.
    """
    header = chunk.header
    if len(chunk.payload) != header.payload_nbytes:
        raise _invalid(header, f"has {len(chunk.payload)} bytes, not {header.payload_nbytes}")
    if header.encoding is Encoding.UNCHANGED and base is not None:
        return None
    first = header.offset // header.dtype.itemsize
    old = None
    if base is not None:
        old = base[header.offset : header.offset + header.nbytes].view(header.dtype.bits)
    if header.encoding is Encoding.DENSE:
        return _dense(header, _unpacked(header, chunk.payload, header.nbytes), old)
    if header.encoding is Encoding.SPARSE_FAST and old is not None:
        limit = sparse_fast.largest_nbytes(len(old), header.dtype.itemsize)
        payload = _unpacked(header, chunk.payload, limit)
        indices, values = sparse_fast.decode(payload, old, changed_count=header.changed_count)
        return Change(dtype=header.dtype, positions=indices + first, values=values)
    why = "needs a base" if base is None else "is not known here"
    raise _invalid(header, f"is {header.encoding}, which {why}")


def _dense(header: ChunkHeader, payload: bytes, old: np.ndarray | None) -> Change:
    new = np.frombuffer(payload, header.dtype.bits)
    if new.nbytes != header.nbytes:
        raise _invalid(header, f"covers {header.nbytes} bytes with {new.nbytes}")
    first = header.offset // header.dtype.itemsize
    indices = np.arange(len(new)) if old is None else np.flatnonzero(new != old)
    return Change(dtype=header.dtype, positions=indices + first, values=new[indices])


def _unpacked(header: ChunkHeader, payload: bytes, limit: int) -> bytes:
    """Undo the compression; a frame that says it is larger than `limit` is refused unread."""
    if header.compression is Compression.NONE:
        return payload
    try:
        if not 0 <= zstandard.frame_content_size(payload) <= limit:
            raise _invalid(header, f"unpacks to more than {limit} bytes")
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _invalid(header, f"is no zstd frame: {error}") from None


def _invalid(header: ChunkHeader, why: str) -> AstraflowError:
    return AstraflowError(Reason.CHUNK_INVALID, f"chunk {header.index} {why}")
