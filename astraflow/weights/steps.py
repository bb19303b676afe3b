"""Steps: patches that lead from one version to another together: one, or those of all shards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from astraflow.core.versions import PatchInfo

Patch = TypeVar("Patch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[Patch]):
    """What leads from a base to a version.

    Attributes:
        base_version: None: from nothing.
        version: What it leads to.
        patches: By shard.
    """

    base_version: int | None
    version: int
    patches: tuple[Patch, ...]


def steps(patches: Iterable[Patch], info_of: Callable[[Patch], PatchInfo]) -> list[Step[Patch]]:
    """Return the steps that can be made of patches, by version.

    Shards belong together when they are of one base, version, profile and count; where one is
    missing there is no step.
    """
    sets: dict[tuple[object, ...], dict[int, Patch]] = {}
    for patch in patches:
        info = info_of(patch)
        name = (info.version, info.base_version, info.profile, info.shard_count)
        sets.setdefault(name, {})[info.shard_rank] = patch
    found: list[Step[Patch]] = []
    for shards in sets.values():
        info = info_of(next(iter(shards.values())))
        if len(shards) == info.shard_count:
            by_rank = tuple(shards[rank] for rank in sorted(shards))
            found.append(
                Step(base_version=info.base_version, version=info.version, patches=by_rank)
            )
    return sorted(found, key=lambda each: each.version)


def itself(info: PatchInfo) -> PatchInfo:
    """Return what a patch is named by, where that is all there is."""
    return info
