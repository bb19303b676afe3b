"""Room for what decoding finds: arrays cut from blocks that are used again.

A patch changes a million elements for each two gigabytes of weights, and what is known of each
takes eight bytes and more. Memory that is fresh from the system costs as much time as a quarter of
the decoding. So a block whose last array is gone is kept for the next patch, up to 16 MiB of them.
"""

import threading
import weakref
from typing import Final

import numpy as np

_BLOCK_NBYTES: Final = 512 << 10
_LEAST_NBYTES: Final = 64 << 10
_MOST_IDLE: Final = 32
_LINE: Final = 64

_idle: list[memoryview] = []


class _Block(threading.local):
    """What is left of the newest block of a thread."""

    rest: np.ndarray = np.empty(0, np.uint8)


_block = _Block()


def empty_changes(
    count: int, bits: np.dtype[np.unsignedinteger]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays for indices (u32[count]), old and new bits (uN[count]); they hold anything."""
    sizes = (4 * count, bits.itemsize * count, bits.itemsize * count)
    second = sizes[0] + -sizes[0] % _LINE
    third = second + sizes[1] + -sizes[1] % _LINE
    room = _take(third + sizes[2] + -sizes[2] % _LINE)
    return (
        room[: sizes[0]].view(np.uint32),
        room[second : second + sizes[1]].view(bits),
        room[third : third + sizes[2]].view(bits),
    )


def _take(nbytes: int) -> np.ndarray:
    if not _LEAST_NBYTES <= nbytes <= _BLOCK_NBYTES:
        return np.empty(nbytes, np.uint8)
    if nbytes > len(_block.rest):
        _block.rest = _new_block()
    taken, _block.rest = _block.rest[:nbytes], _block.rest[nbytes:]
    return taken


def _new_block() -> np.ndarray:
    try:
        pages = _idle.pop()
    except IndexError:
        pages = np.empty(_BLOCK_NBYTES, np.uint8).data
    # Arrays that are cut from it hold on to this one, so it goes when the last of them is gone.
    block = np.frombuffer(pages, np.uint8)
    weakref.finalize(block, _keep, pages).atexit = False
    return block


def _keep(pages: memoryview) -> None:
    if len(_idle) < _MOST_IDLE:
        _idle.append(pages)
