"""Forward: the patch from one version to the next, its ranges coded by several threads.

The bytes are those of `codec.encode.encode_patch`: they do not depend on how many threads there
are. What reads the arrays must give each thread bits of its own, as `Exported` does.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from astraflow.codec.chunk_list import merge_unchanged, numbered
from astraflow.codec.encode import EncodedPatch, RangeBits
from astraflow.codec.encode_range import EncodedRange, encode_fast
from astraflow.codec.runs import ChunkRange
from astraflow.codec.state_digest import StateDigest
from astraflow.weights.parts import Part

_MOST_THREADS: Final = 4
# Each thread takes about 10 MB while it encodes: little beside so much.
_NBYTES_PER_THREAD: Final = 128 << 20


def thread_count_for(nbytes: int) -> int:
    """Return with how many threads so many bytes are coded: one per core, four at most."""
    most = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return max(1, min(most, nbytes // _NBYTES_PER_THREAD))


def encode_forward(
    part: Part, target: RangeBits, base: RangeBits, digest: StateDigest, *, thread_count: int
) -> EncodedPatch:
    """Return the patch that leads from `base` to `target`, in the profile FAST.

    Args:
        part: What is encoded.
        target: The new state; called from every thread.
        base: The old one; called from every thread.
        digest: Of the old one.
        thread_count: At least one.
    """
    encoded = [*_encoded(part, target, base, thread_count)]
    low, high = sum(each.low for each in encoded), sum(each.high for each in encoded)
    return EncodedPatch(
        chunks=numbered(merge_unchanged(each.chunk for each in encoded)),
        digest=digest.plus_sums(low, high),
    )


def _encoded(
    part: Part, target: RangeBits, base: RangeBits, thread_count: int
) -> Iterator[EncodedRange]:
    def encode(where: ChunkRange) -> EncodedRange:
        return encode_fast(where, target(where), base(where))

    if thread_count == 1:
        yield from map(encode, part.ranges())
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="astraflow-encode") as threads:
        yield from threads.map(encode, part.ranges())
