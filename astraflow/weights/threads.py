"""Threads: how many of them encode the versions of a model."""

import os
from typing import Final

_MOST: Final = 4
# Each takes about 10 MB while it encodes: little beside so much.
_NBYTES_PER_THREAD: Final = 128 << 20


def thread_count_for(nbytes: int) -> int:
    """Return with how many threads so many bytes are coded: one per core, four at most."""
    most = min(_MOST, len(os.sched_getaffinity(0)))
    return max(1, min(most, nbytes // _NBYTES_PER_THREAD))
