"""Stored patches: their names, digests and chunks, or how those are made again; and makers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from astraflow.codec.chunks import CODEC_VERSION, Chunk, ChunkHeader
from astraflow.codec.encode import encode_chunk, encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.weights.patches.history import History
from astraflow.weights.patches.shard_layout import WHOLE, Shard
from astraflow.wire.transfers import ChunkSet
from astraflow.wire.weights import PatchIndex, digest_of, root_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchName:
    """What a patch is, before its bytes are known."""

    version: int
    base_version: int | None
    profile: CodecProfile = CodecProfile.FAST
    shard: Shard = WHOLE

    @classmethod
    def of(cls, info: PatchInfo) -> Self:
        shard = Shard(rank=info.shard_rank, count=info.shard_count)
        return cls(
            version=info.version, base_version=info.base_version, profile=info.profile, shard=shard
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPatch:
    """A patch.

    Attributes:
        index: Its digests and tables.
        headers: Of its chunks.
        chunks: None: they are made again from the versions that it leads between.
    """

    index: PatchIndex
    headers: tuple[ChunkHeader, ...]
    chunks: tuple[Chunk, ...] | None

    @classmethod
    def of(
        cls,
        name: PatchName,
        chunks: Iterable[Chunk],
        *,
        tables: bytes = b"",
        is_kept: bool = True,
    ) -> Self:
        """Return a patch of some chunks, by index.

        Args:
            name: What it is.
            chunks: Taken one by one.
            tables: Shared by the chunks.
            is_kept: Whether their payloads are kept; else only headers and digests are.
        """
        headers: list[ChunkHeader] = []
        digests: list[bytes] = []
        kept: list[Chunk] = []
        for chunk in chunks:
            headers.append(chunk.header)
            digests.append(digest_of(chunk))
            if is_kept:
                kept.append(chunk)
        info = PatchInfo(
            base_version=name.base_version,
            version=name.version,
            profile=name.profile,
            codec_version=CODEC_VERSION,
            root_digest=root_digest(digests, tables),
            chunk_count=len(headers),
            payload_nbytes=sum(header.payload_nbytes for header in headers),
            shard_rank=name.shard.rank,
            shard_count=name.shard.count,
        )
        index = PatchIndex(patch=info, chunk_digests=tuple(digests), shared_tables=tables)
        return cls(index=index, headers=tuple(headers), chunks=tuple(kept) if is_kept else None)

    @property
    def info(self) -> PatchInfo:
        return self.index.patch

    @property
    def root(self) -> bytes:
        return self.index.patch.root_digest

    @property
    def oldest_version(self) -> int:
        """The older of the versions that it leads between."""
        base = self.info.base_version
        return self.info.version if base is None else base

    def is_sound(self) -> bool:
        """Whether the payloads that are kept are what their digests say; reads all of them."""
        kept = zip(self.chunks or (), self.index.chunk_digests, strict=False)
        return all(digest_of(chunk) == digest for chunk, digest in kept)

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return the payload of some chunks."""
        return sum(self.headers[index].payload_nbytes for index in indexes)

    def touches(self, index: int, ranges: Sequence[range]) -> bool:
        """Whether a chunk lies in one of some ranges, in bytes; none: it does."""
        return touches(self.headers[index], ranges)

    def missing_nbytes(self, have: ChunkSet | None) -> int:
        """Return the payload of the chunks that a reader does not have."""
        if have is None:
            return self.info.payload_nbytes
        return sum(h.payload_nbytes for n, h in enumerate(self.headers) if n not in have)


Way = tuple[StoredPatch, ...]
"""Patches that are applied one after the other."""


def cheapest_way(
    patches: Iterable[StoredPatch],
    base: int | None,
    version: int,
    cost: Callable[[StoredPatch], float],
) -> tuple[float, Way] | None:
    """Return the way of the least cost from a base, or from nothing, to a version.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (0 -> 2: 7) the way from 0 to 2
    is the last one alone.

    Returns:
        None: there is no way.
    """
    ways: dict[int | None, tuple[float, Way]] = {base: (0.0, ())}
    # Patches lead to later versions only, so what leads to a base is known before it is used.
    for patch in sorted(patches, key=lambda each: each.info.version):
        info = patch.info
        start = ways.get(info.base_version)
        if start is None or info.version == base:
            continue
        total = start[0] + cost(patch)
        known = ways.get(info.version)
        if known is None or total < known[0]:
            ways[info.version] = (total, (*start[1], patch))
    return ways.get(version)


def touches(header: ChunkHeader, ranges: Sequence[range]) -> bool:
    """Whether a chunk lies in one of some ranges, in bytes; none: it does."""
    return not ranges or any(
        each.start < header.end and header.offset < each.stop for each in ranges
    )


# Nobody asks for the digest of a state that a history has already: what counts are changes.
_UNUSED: Final = StateDigest()


def make_patch(
    history: History,
    base: int,
    version: int,
    *,
    profile: CodecProfile = CodecProfile.FAST,
    is_kept: bool = False,
) -> StoredPatch:
    """Return ONE patch over several versions.

    An element that changed twice is in it once, and one that changed back is not.

    Args:
        history: Reaches both versions.
        base: The older one.
        version: The newer one.
        profile: How it is coded.
        is_kept: Whether its payloads are kept; else they are made again when they are asked for.

    Raises:
        AstraflowError: VERSION_EVICTED when the history no longer reaches the base.
    """
    encoded = encode_patch(
        history.shard_layout,
        history.bits_of(version),
        history.bits_of(base),
        _UNUSED,
        profile=profile,
    )
    name = _name(history.shard_layout.shard, version, base, profile)
    return StoredPatch.of(name, encoded.chunks, tables=encoded.shared_tables, is_kept=is_kept)


def make_whole(
    history: History, version: int, *, profile: CodecProfile = CodecProfile.FAST
) -> StoredPatch:
    """Return the patch from nothing to a version, range by range; its payloads are not kept.

    Raises:
        AstraflowError: VERSION_EVICTED when the history no longer reaches the version.
    """
    name = _name(history.shard_layout.shard, version, None, profile)
    return StoredPatch.of(name, _whole_chunks(history, version, profile), is_kept=False)


def _whole_chunks(history: History, version: int, profile: CodecProfile) -> Iterator[Chunk]:
    bits = history.bits_of(version)
    for index, where in enumerate(history.shard_layout.ranges()):
        chunk = encode_chunk(where, bits(where), None, profile=profile)
        yield replace(chunk, header=replace(chunk.header, index=index))


def _name(shard: Shard, version: int, base: int | None, profile: CodecProfile) -> PatchName:
    return PatchName(version=version, base_version=base, profile=profile, shard=shard)
