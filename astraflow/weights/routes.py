"""Routes: which way to a version costs the fewest bytes."""

from collections.abc import Mapping

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.weights.links import PROFILES


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
        steps = [
            costs[patch.base_version] + patch.payload_nbytes
            for patch in known[version].patches
            if patch.base_version in costs and is_readable(patch)
        ]
        if steps and version not in costs:
            costs[version] = min(steps)
    return costs.get(target)


def is_readable(patch: PatchInfo) -> bool:
    """Whether this release can decode a patch: the whole layout, profile and byte format."""
    return (
        patch.shard_count == 1
        and patch.profile in PROFILES
        and patch.codec_version == CODEC_VERSION
    )
