"""Routes: which patches lead from one version to another, and what they cost a reader."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.codec.rates import measured_rates
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.wire.transfers import TransferBound, TransferSpec

PROFILES: Final = (CodecProfile.FAST, CodecProfile.COMPACT)
"""What is coded and decoded by this release."""

READABLE: Final = frozenset((profile, CODEC_VERSION) for profile in PROFILES)
"""Profiles and codec versions of patches that this release reads."""

# What coding a second patch costs however small it is, and what measured goodputs are off by.
_LEAST_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """What it costs to code a patch compactly after it was coded fast.

    Attributes:
        share: Bytes for one of the fast patch; at 1 % changed 0.87 to 1.36.
        encoded_per_s: Bytes of the model.
    """

    share: float = 0.65
    encoded_per_s: float = field(
        default_factory=lambda: measured_rates().encode_bytes_per_s[CodecProfile.COMPACT]
    )

    def seconds(self, model_nbytes: int) -> float:
        return model_nbytes / self.encoded_per_s + _LEAST_S

    def gained_s(self, spec: TransferSpec, nbytes: int, model_nbytes: int) -> float:
        """Return how much sooner a reader with a known link is done if it waits for the patch."""
        compact_nbytes = round(nbytes * self.share)
        saved = (nbytes - compact_nbytes) / spec.goodput_bytes_per_s
        slower = decoding_s(spec, CodecProfile.COMPACT, model_nbytes, compact_nbytes)
        slower -= decoding_s(spec, CodecProfile.FAST, model_nbytes, nbytes)
        return saved - slower - self.seconds(model_nbytes)

    def is_worth(self, readers: Iterable[TransferSpec], nbytes: int, model_nbytes: int) -> bool:
        """Whether readers with known links, together, have a new version sooner."""
        known = (each for each in readers if each.goodput_bytes_per_s > 0)
        return sum(self.gained_s(each, nbytes, model_nbytes) for each in known) > 0


def profile_choices(spec: TransferSpec) -> tuple[frozenset[CodecProfile], ...]:
    """Return which profiles a reader takes: the first set with which there is a way is used."""
    if not spec.profiles:
        return (frozenset(CodecProfile),)
    profiles = tuple(dict.fromkeys(spec.profiles))
    return tuple(frozenset(profiles[: n + 1]) for n in range(len(profiles)))


def decoding_s(
    spec: TransferSpec,
    profile: CodecProfile,
    model_nbytes: int,
    nbytes: int,
    *,
    is_whole: bool = False,
) -> float:
    """Return how long a reader decodes a patch of so many bytes."""
    of_reader = (each for each in spec.decode_rates if each.profile is profile)
    rate = next(of_reader, None) or measured_rates().decode[profile]
    return rate.seconds(model_nbytes, nbytes, is_whole=is_whole) / max(spec.core_count, 1)


PatchStep = tuple[PatchInfo, ...]
"""What leads from a base (None: from nothing) to a version: its patches, by shard."""


def steps(patches: Iterable[PatchInfo]) -> list[PatchStep]:
    """Return the steps that can be made of patches, by version.

    Shards belong together when they are of one base, version, profile and count; where one is
    missing there is no step.
    """
    sets: dict[tuple[object, ...], dict[int, PatchInfo]] = {}
    for info in patches:
        name = (info.version, info.base_version, info.profile, info.shard_count)
        sets.setdefault(name, {})[info.shard_rank] = info
    found = (tuple(shards[rank] for rank in sorted(shards)) for shards in sets.values())
    whole = (step for step in found if len(step) == step[0].shard_count)
    return sorted(whole, key=lambda step: step[0].version)


def cheapest_way(
    steps: Iterable[PatchStep],
    base: int | None,
    version: int,
    cost: Callable[[PatchInfo], float],
) -> tuple[float, tuple[PatchInfo, ...]] | None:
    """Return the way of the least cost from a base to a version, and that cost.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (0 -> 2: 7) the way from 0 to 2
    is the last one alone.

    Steps come by version: they lead to later ones only, so that what leads to a base is known
    before it is used. None: there is no way; as a base, nothing is held.
    """
    ways: dict[int | None, tuple[float, tuple[PatchInfo, ...]]] = {base: (0.0, ())}
    for step in steps:
        start, end = ways.get(step[0].base_version), step[0].version
        if start is None or (base is not None and end <= base):
            continue
        total = start[0] + sum(map(cost, step))
        known = ways.get(end)
        if known is None or total < known[0]:
            ways[end] = (total, (*start[1], *step))
    return ways.get(version)


def payload_nbytes(known: Mapping[int, VersionInfo], base: int | None, target: int) -> int | None:
    """Return the fewest bytes of registered patches that lead from a base to a version, or None.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (nothing -> 2: 100) the way
    from 0 to 2 costs 10, and the way from nothing 100.
    """
    readable = _registered_steps(known, base, target)
    found = cheapest_way(readable, base, target, lambda info: info.payload_nbytes)
    return None if found is None else int(found[0])


def registered_bound(
    known: Mapping[int, VersionInfo], base: int | None, target: int
) -> TransferBound | None:
    """Return what a way of registered patches from a base to a version has at most, or None.

    With patches (nothing -> 0: 100), (0 -> 1: 5), (1 -> 2: 5) and (0 -> 2: 7 bytes) it is 10 bytes
    in 2 patches from 0 to 2.
    """
    most: dict[int | None, tuple[int, ...]] = {base: (0, 0, 0)}
    for step in _registered_steps(known, base, target):
        if step[0].base_version not in most:
            continue
        chunk_count = sum(patch.chunk_count for patch in step)
        sizes = (len(step), chunk_count, sum(patch.payload_nbytes for patch in step))
        way = map(sum, zip(most[step[0].base_version], sizes, strict=True))
        end = step[0].version
        most[end] = tuple(map(max, way, most.get(end, (0, 0, 0))))
    if target not in most or target == base:
        return None
    patches, chunks, nbytes = most[target]
    return TransferBound(patch_count=patches, chunk_count=chunks, payload_nbytes=nbytes)


def _registered_steps(
    known: Mapping[int, VersionInfo], base: int | None, target: int
) -> list[PatchStep]:
    """Return what may lie on a way from a base to a version, by version."""
    return steps(
        replace(patch, version=version)
        for version, info in known.items()
        if version <= target and (base is None or version > base)
        for patch in info.patches
        if (patch.profile, patch.codec_version) in READABLE
    )
