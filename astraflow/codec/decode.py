"""Decoding: a chunk and the bits of its range in the base become absolute new bits."""

import numpy as np
import zstandard

from astraflow.codec import dense_planes, sparse_compact, sparse_fast
from astraflow.codec.changes import Change, FoundChanges
from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding, chunk_invalid
from astraflow.codec.shared_tables import read_shared_tables
from astraflow.core.errors import AstraflowError


def decode_change(chunk: Chunk, old: np.ndarray, tables: bytes = b"") -> Change | None:
    """Return what a chunk changes; None: nothing.

    Args:
        chunk: Its header was checked against the layout and its digest verified.
        old: uN[element_count], the bits of its range in the base.
        tables: The patch's `shared_tables`, verified with its root.

    Raises:
        AstraflowError: CHUNK_INVALID when the payload contradicts itself or its header.
    """
    if chunk.header.encoding is Encoding.UNCHANGED:
        _unpacked(chunk, 0)
        return None
    found, where = _found(chunk, old, tables), chunk.header
    if not len(found.indices):
        return None
    return Change(dtype=where.dtype, first=where.first, **found._asdict())


def decode_back(chunk: Chunk, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what a range was before a sparse chunk changed it.

    Args:
        chunk: SPARSE_FAST, made here or verified.
        new: uN[element_count], the bits of its range in the version that it leads to.

    Returns:
        u32[n] rising indices into the range, and the old bits uN[n].

    Raises:
        AstraflowError: CHUNK_INVALID when it does not lead back, or contradicts itself.
    """
    header = chunk.header
    if header.encoding is not Encoding.SPARSE_FAST:
        raise _invalid(header, f"is {header.encoding}, which does not lead back")
    found = sparse_fast.decode(_plain(chunk), new, changed_count=header.changed_count, is_back=True)
    return found.indices, found.values


def decode_whole(chunk: Chunk) -> np.ndarray:
    """Return all bits of a chunk's range, which needs no base: uN[element_count], read-only.

    Raises:
        AstraflowError: CHUNK_INVALID when it needs a base, or as `decode_change`.
    """
    header = chunk.header
    if header.encoding is Encoding.DENSE:
        payload = _unpacked(chunk, header.nbytes)
        if len(payload) != header.nbytes:
            raise _invalid(header, f"covers {header.nbytes} bytes with {len(payload)}")
        return np.frombuffer(payload, header.dtype.bits)
    if header.encoding is not Encoding.DENSE_PLANES:
        raise _invalid(header, f"is {header.encoding}, which needs a base")
    return dense_planes.decode(header.dtype, _plain(chunk), header.element_count)


def _found(chunk: Chunk, old: np.ndarray, tables: bytes) -> FoundChanges:
    header = chunk.header
    first, count = header.first, header.changed_count
    if count > header.element_count:
        raise _invalid(header, f"changes {count} of {header.element_count} elements")
    if header.encoding is Encoding.SPARSE_FAST:
        return sparse_fast.decode(_plain(chunk), old, changed_count=count, first=first)
    if header.encoding is Encoding.SPARSE_COMPACT:
        section = read_shared_tables(tables).get(header.dtype)
        if section is None:
            raise _invalid(header, f"needs tables for {header.dtype}, of which there are none")
        payload = _plain(chunk)
        return sparse_compact.decode(payload, old, section, changed_count=count, first=first)
    new = decode_whole(chunk)
    indices = np.flatnonzero(new != old)
    return FoundChanges(indices.astype(np.uint32), old[indices], new[indices])


def _plain(chunk: Chunk) -> bytes | memoryview:
    """Return a payload that packs its own streams, if it packs them."""
    if chunk.header.compression is not Compression.NONE:
        raise _invalid(chunk.header, "is packed twice")
    return _unpacked(chunk, 0)


def _unpacked(chunk: Chunk, limit: int) -> bytes | memoryview:
    """Undo the compression; a frame that says it is larger than `limit` is refused unread."""
    header, payload = chunk.header, chunk.payload
    if len(payload) != header.payload_nbytes:
        raise _invalid(header, f"has {len(payload)} bytes, not {header.payload_nbytes}")
    if header.compression is Compression.NONE:
        return payload
    try:
        if not 0 <= zstandard.frame_content_size(payload) <= limit:
            raise _invalid(header, f"unpacks to more than {limit} bytes")
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _invalid(header, f"is no zstd frame: {error}") from None


def _invalid(header: ChunkHeader, why: str) -> AstraflowError:
    return chunk_invalid(f"chunk {header.index} {why}")
