"""Seeds: every trajectory of an episode draws with one of its own."""

import hashlib


def trajectory_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of an episode's trajectory, in [0, 2**63); the first has the sample's own."""
    if seed is None or index == 0:
        return seed
    return mixed_seed(seed, index)


def mixed_seed(seed: int | None, other: int) -> int:
    """Return a seed made of two, in [0, 2**63); None is a seed like any other."""
    digest = hashlib.blake2b(f"{seed}/{other}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
