"""The maker: patches between any two versions that a history still reaches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from astraflow.codec.chunks import Chunk
from astraflow.codec.encode import encode_chunk, encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.versions import CodecProfile
from astraflow.weights.history import History
from astraflow.weights.parts import Shard
from astraflow.weights.stored import PatchName, StoredPatch

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
        history.part,
        history.bits_of(version),
        history.bits_of(base),
        _UNUSED,
        profile=profile,
    )
    name = _name(history.part.shard, version, base, profile)
    return StoredPatch.of(name, encoded.chunks, tables=encoded.shared_tables, is_kept=is_kept)


def make_whole(
    history: History, version: int, *, profile: CodecProfile = CodecProfile.FAST
) -> StoredPatch:
    """Return the patch from nothing to a version, range by range; its payloads are not kept.

    Raises:
        AstraflowError: VERSION_EVICTED when the history no longer reaches the version.
    """
    name = _name(history.part.shard, version, None, profile)
    return StoredPatch.of(name, _whole_chunks(history, version, profile), is_kept=False)


def _whole_chunks(history: History, version: int, profile: CodecProfile) -> Iterator[Chunk]:
    bits = history.bits_of(version)
    for index, where in enumerate(history.part.ranges()):
        chunk = encode_chunk(where, bits(where), None, profile=profile)
        yield replace(chunk, header=replace(chunk.header, index=index))


def _name(shard: Shard, version: int, base: int | None, profile: CodecProfile) -> PatchName:
    return PatchName(version=version, base_version=base, profile=profile, shard=shard)
