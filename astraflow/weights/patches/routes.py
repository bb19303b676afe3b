"""Routes: which patches lead from one version to another, and what they cost a reader."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.wire.transfers import TransferBound

PROFILES: Final = (CodecProfile.FAST, CodecProfile.COMPACT)
"""What is coded and decoded by this release."""

# What coding a second patch costs however small it is, and what measured goodputs are off by.
_LEAST_S: Final = 0.01
APPLIED_PER_S: Final = {CodecProfile.FAST: 10e9, CodecProfile.COMPACT: 4.6e9}
"""Bytes of the model per second of one core: decoding, verifying and applying a patch.

Measured by benchmarks/codec.py at 1 % changed, on a machine that did other work as well.
"""

# The same from nothing: raw bytes are copied, planes are put together again, all is digested.
_FILLED_PER_S: Final = {CodecProfile.FAST: 1e9, CodecProfile.COMPACT: 0.75e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """What it costs to code a patch compactly after it was coded fast.

    Attributes:
        share: Bytes for one of the fast patch; at 1 % changed 0.87 to 1.36.
        encoded_per_s: Bytes of the model.
    """

    share: float = 0.65
    encoded_per_s: float = 3e9

    def seconds(self, model_nbytes: int) -> float:
        return model_nbytes / self.encoded_per_s + _LEAST_S

    def is_worth(self, links: Iterable["Link"], nbytes: int, model_nbytes: int) -> bool:
        """Whether readers with known links, together, have a new version sooner.

        Args:
            links: What they told.
            nbytes: Of the fast patch.
            model_nbytes: Of what is coded.
        """
        known = (each for each in links if each.goodput_bytes_per_s > 0)
        return sum(each.gained_s(nbytes, model_nbytes, self) for each in known) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a reader told of itself.

    Attributes:
        profiles: It takes these, in order of preference; empty: what costs it the least time.
        goodput_bytes_per_s: Measured; 0: unknown, and then bytes alone count.
        core_count: Cores that it decodes on; 0: unknown, and then it is one.
    """

    profiles: tuple[CodecProfile, ...] = ()
    goodput_bytes_per_s: float = 0.0
    core_count: int = 0

    def choices(self) -> tuple[frozenset[CodecProfile], ...]:
        """Return which profiles may be used: the first set with which there is a way is."""
        if not self.profiles:
            return (frozenset(CodecProfile),)
        counts = range(1, len(self.profiles) + 1)
        return tuple(frozenset(self.profiles[:count]) for count in counts)

    def gained_s(self, nbytes: int, model_nbytes: int, compact: "Compact") -> float:
        """Return how much sooner the reader is done if it waits for a compact patch.

        Args:
            nbytes: Of the fast patch, which there is.
            model_nbytes: Of what is coded.
            compact: What coding it costs.
        """
        saved = nbytes * (1 - compact.share) / self.goodput_bytes_per_s
        slower = 1 / APPLIED_PER_S[CodecProfile.COMPACT] - 1 / APPLIED_PER_S[CodecProfile.FAST]
        decoding = model_nbytes * slower / max(self.core_count, 1)
        return saved - decoding - compact.seconds(model_nbytes)

    def cost(self, info: PatchInfo, nbytes: int, model_nbytes: int) -> float:
        """Return what a patch costs: seconds, or bytes where the goodput is unknown.

        At 1 % changed the profiles cost the same at about 12 MB/s for each core.

        Args:
            info: Names the patch.
            nbytes: Of it that are to be sent.
            model_nbytes: Of what is decoded.
        """
        if self.goodput_bytes_per_s <= 0:
            return nbytes
        rates = _FILLED_PER_S if info.base_version is None else APPLIED_PER_S
        decoding = model_nbytes / rates[info.profile] / max(self.core_count, 1)
        return nbytes / self.goodput_bytes_per_s + decoding


Patch = TypeVar("Patch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStep(Generic[Patch]):
    """What leads from a base to a version.

    Attributes:
        base_version: None: from nothing.
        version: What it leads to.
        patches: By shard.
    """

    base_version: int | None
    version: int
    patches: tuple[Patch, ...]


def steps(
    patches: Iterable[Patch], info_of: Callable[[Patch], PatchInfo]
) -> list[PatchStep[Patch]]:
    """Return the steps that can be made of patches, by version.

    Shards belong together when they are of one base, version, profile and count; where one is
    missing there is no step.
    """
    sets: dict[tuple[object, ...], dict[int, Patch]] = {}
    for patch in patches:
        info = info_of(patch)
        name = (info.version, info.base_version, info.profile, info.shard_count)
        sets.setdefault(name, {})[info.shard_rank] = patch
    found: list[PatchStep[Patch]] = []
    for shards in sets.values():
        info = info_of(next(iter(shards.values())))
        if len(shards) == info.shard_count:
            by_rank = tuple(shards[rank] for rank in sorted(shards))
            found.append(
                PatchStep(base_version=info.base_version, version=info.version, patches=by_rank)
            )
    return sorted(found, key=lambda each: each.version)


def itself(info: PatchInfo) -> PatchInfo:
    """Return what a patch is named by, where that is all there is."""
    return info


def payload_nbytes(known: Mapping[int, VersionInfo], base: int | None, target: int) -> int | None:
    """Return the fewest bytes of registered patches that lead from a base to a version.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (nothing -> 2: 100) the way
    from 0 to 2 costs 10, and the way from nothing 100.

    Args:
        known: Versions as the run told them.
        base: What is held; None: nothing.
        target: What is wanted.

    Returns:
        None when no way is known.
    """
    costs: dict[int | None, int] = {base: 0}
    for version in sorted(known):
        readable = filter(is_readable, known[version].patches)
        sums = [
            costs[step.base_version] + sum(patch.payload_nbytes for patch in step.patches)
            for step in steps(readable, itself)
            if step.base_version in costs
        ]
        if sums and version not in costs:
            costs[version] = min(sums)
    return costs.get(target)


def registered_bound(
    known: Mapping[int, VersionInfo], base: int | None, target: int
) -> TransferBound | None:
    """Return what a way of registered patches from a base to a version has at most.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (0 -> 2: 7 bytes) it is 10 bytes
    in 2 patches from 0 to 2.

    Args:
        known: Versions as the run told them.
        base: What is held; None: nothing.
        target: What is wanted.

    Returns:
        None when no way is known.
    """
    most: dict[int | None, tuple[int, int, int]] = {base: (0, 0, 0)}
    for version in sorted(known):
        if base is not None and version <= base:
            continue
        for step in steps(filter(is_readable, known[version].patches), itself):
            if step.base_version not in most:
                continue
            sizes = (
                len(step.patches),
                sum(patch.chunk_count for patch in step.patches),
                sum(patch.payload_nbytes for patch in step.patches),
            )
            way = [sum(each) for each in zip(most[step.base_version], sizes, strict=True)]
            before = most.get(version, (0, 0, 0))
            patches, chunks, nbytes = map(max, way, before)
            most[version] = patches, chunks, nbytes
    if target not in most or target == base:
        return None
    patches, chunks, nbytes = most[target]
    return TransferBound(patch_count=patches, chunk_count=chunks, payload_nbytes=nbytes)


def is_readable(patch: PatchInfo) -> bool:
    """Whether this release can decode a patch: its profile and byte format."""
    return patch.profile in PROFILES and patch.codec_version == CODEC_VERSION
