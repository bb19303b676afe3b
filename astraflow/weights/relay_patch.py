"""Patches that a relay passes on while they arrive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astraflow.codec.chunks import Chunk
from astraflow.codec.encode import encode_whole, flat_bits
from astraflow.core.versions import PatchInfo
from astraflow.weights.incoming import Incoming
from astraflow.weights.state import HeldState
from astraflow.weights.stored import touches
from astraflow.wire.patches import PatchIndex, digest_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelayPatch:
    """A patch of which some chunks may still be on their way.

    Attributes:
        index: Its digests.
        chunks: Those that are here; grows.
    """

    index: PatchIndex
    chunks: Mapping[int, Chunk]

    @property
    def info(self) -> PatchInfo:
        """Names it."""
        return self.index.patch

    @property
    def root(self) -> bytes:
        """Its root digest."""
        return self.index.patch.root_digest

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are here."""
        return len(self.chunks) == self.info.chunk_count

    @property
    def nbytes(self) -> int:
        """Payload that is here."""
        return sum(len(chunk.payload) for chunk in self.chunks.values())

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return what some chunks have at most: those on their way are counted by the whole."""
        if all(index in self.chunks for index in indexes):
            return sum(len(self.chunks[index].payload) for index in indexes)
        return self.info.payload_nbytes

    def touches(self, index: int, ranges: Sequence[range]) -> bool:
        """Whether a chunk may lie in one of some ranges, in bytes; none: it does."""
        chunk = self.chunks.get(index)
        return chunk is None or touches(chunk.header, ranges)


def arriving_patches(incoming: Incoming) -> dict[bytes, RelayPatch]:
    """Return the patches of a pull by their root digests; their chunks grow as they come."""
    return {
        index.patch.root_digest: RelayPatch(index=index, chunks=chunks)
        for index, chunks in incoming.arriving()
    }


def whole_patch(held: HeldState, info: PatchInfo) -> RelayPatch | None:
    """Return the whole patch of a state; None: its bytes are not those that were registered."""
    chunks = encode_whole(held.frame.runs, flat_bits(held.flat)).chunks
    index = PatchIndex(patch=info, chunk_digests=tuple(map(digest_of, chunks)))
    if index.root_digest != info.root_digest:
        return None
    return RelayPatch(index=index, chunks=dict(enumerate(chunks)))
