"""Chunks: the unit that is verified, staged, forwarded and resumed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from astraflow.core.dtype import Dtype
from astraflow.core.versions import CodecProfile

Profile = CodecProfile
"""How a patch is coded: quickly or small."""

CODEC_VERSION: Final = 3
"""Of the byte format in docs/weights.md; raised when the bytes of any patch would change."""

CHUNK_NBYTES: Final = 4 << 20
"""Largest payload, and the grid by which layouts are cut."""

MAX_RANGE_NBYTES: Final = 64 << 20
"""Largest range of a chunk that has a payload."""


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

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.offset + self.nbytes

    @property
    def element_count(self) -> int:
        """Elements in the range."""
        return self.nbytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A header and its payload; a raw one may look into the state that it was cut from."""

    header: ChunkHeader
    payload: bytes | memoryview = b""
