"""Memory of long processes: what is kept for good is not looked through again and again."""

import ctypes
import gc
from contextlib import suppress

_THRESHOLDS = gc.get_threshold()


def expect_imports() -> None:
    """Have the collector look seldom until `keep_for_good`: call it first in a process.

    Nearly all of the million objects that torch and its libraries make stay: going through them
    as they come takes a fifth of the time that it takes to import them.
    """
    gc.set_threshold(200_000, *_THRESHOLDS[1:])


def keep_for_good() -> None:
    """Leave all that exists now out of later collections; call it once a process is ready.

    With torch and its libraries loaded a full collection walks a million objects, a third of a
    second in which nothing else runs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_rarely() -> None:
    """Have the collector look through what is young alone, for a process of few cycles.

    A hub keeps thousands of rollouts: a walk over what was made in the last seconds takes longer
    than a call may wait, and the cycles that gRPC leaves, one a call, are found among the youngest
    2,000 objects, in a millisecond or two. What survives that is looked through after two million
    more, and all there is a hundred times less often.
    """
    gc.set_threshold(2_000, 1_000, 100)


# mallopt's numbers, of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_NBYTES = 32 << 20


def reuse_memory() -> None:
    """Have the allocator keep what is let go, for a process through which large messages pass.

    glibc gives blocks of 128 KiB and more back to the kernel each time, which fills the next one
    with zeros page by page: an eighth of what a hub does under load. Up to 32 MiB a block and
    128 MiB at the end of the heap are kept. Nothing happens with another allocator.
    """
    with suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)
        allocator.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_NBYTES)
