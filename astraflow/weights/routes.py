"""Routes: which way to a version costs the fewest bytes."""

from collections.abc import Mapping

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.weights.links import PROFILES
from astraflow.weights.steps import itself, steps


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


def is_readable(patch: PatchInfo) -> bool:
    """Whether this release can decode a patch: its profile and byte format."""
    return patch.profile in PROFILES and patch.codec_version == CODEC_VERSION
