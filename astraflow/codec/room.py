"""Room for what decoding finds, in large pages where the system has them.

A patch changes a million elements for each two gigabytes of weights, and what is known of each
takes eight bytes and more. Memory that is fresh from the system costs two microseconds for every
page of 4 KiB, as long as decoding 500 changes; so arrays are cut from blocks of two large pages.
A block is given back to the system when the last array in it is gone.
"""

import mmap
import sys
import threading
from contextlib import suppress
from typing import Final

import numpy as np

_BLOCK_NBYTES: Final = 4 << 20
_LEAST_NBYTES: Final = 64 << 10
_LINE: Final = 64


class _Block(threading.local):
    """What is left of the newest block of a thread."""

    rest: np.ndarray = np.empty(0, np.uint8)


_block = _Block()


def empty_changes(count: int, bits: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays for indices (u32[count]), old and new bits (uN[count]); they hold anything."""
    sizes = [4 * count, bits.itemsize * count, bits.itemsize * count]
    sizes = [size + -size % _LINE for size in sizes]
    room = _take(sum(sizes))
    indices, before, values = np.split(room, np.cumsum(sizes)[:2])
    return (
        indices[: 4 * count].view(np.uint32),
        before[: bits.itemsize * count].view(bits),
        values[: bits.itemsize * count].view(bits),
    )


def _take(nbytes: int) -> np.ndarray:
    if not _LEAST_NBYTES <= nbytes <= _BLOCK_NBYTES:
        return np.empty(nbytes, np.uint8)
    if nbytes > len(_block.rest):
        _block.rest = _new_block()
    taken, _block.rest = _block.rest[:nbytes], _block.rest[nbytes:]
    return taken


def _new_block() -> np.ndarray:
    if sys.platform != "linux":
        return np.empty(_BLOCK_NBYTES, np.uint8)
    pages = mmap.mmap(-1, _BLOCK_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A system without large pages gives small ones.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
