"""Arenas: memory of a puller that a source on the same host writes into.

A source can write into it at any time, so what it brought is copied out before it is verified.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.frames import bad_frame
from astraflow.wire.transfers import TransferPlan

_ALIGNMENT: Final = 64


def aligned(nbytes: int) -> int:
    """Return a size with the gap behind it that lets the next payload begin well."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def arena_nbytes(plan: TransferPlan) -> int:
    return aligned(plan.payload_nbytes) + plan.chunk_count * _ALIGNMENT


# What a large transfer brought is given back piece by piece, so that it is not there twice.
_WARM_NBYTES: Final = 64 << 20


class Arena:
    """Where a source puts the payloads of one transfer; its memory is reused after it."""

    def __init__(self, memory: "_Memory") -> None:
        # It closes the descriptor when it goes.
        self._memory = memory
        self.descriptor = memory.descriptor
        self.nbytes = memory.nbytes
        self._taken_nbytes = 0
        memory.user = weakref.ref(self)

    def payload(self, offset: int, nbytes: int) -> memoryview:
        """Copy a payload out of the arena; return a view of the copy, not to be written."""
        self._taken_nbytes += nbytes
        if not 0 <= offset <= offset + nbytes <= self.nbytes or self._taken_nbytes > self.nbytes:
            raise bad_frame("a payload lies outside of the arena")
        part = self._memory.shared[offset : offset + nbytes].copy()
        if self.nbytes > _WARM_NBYTES:
            self._memory.give_back(offset, nbytes)
        return part.data.toreadonly()


class ArenaPool:
    """Keeps the memory of the last transfer for the next, once that one is over.

    Its pages are warm, unless it is large: writing into fresh ones costs more than the copy.
    """

    def __init__(self) -> None:
        self._last: _Memory | None = None

    def take(self, nbytes: int) -> Arena:
        if self._last is None or self._last.nbytes < nbytes or self._last.is_used:
            try:
                self._last = _Memory(nbytes)
            except OSError as error:
                raise AstraflowError(
                    Reason.LANE_UNAVAILABLE,
                    f"the system gives no {nbytes} bytes of shared memory ({error.strerror}); free"
                    " some or raise the limits of memory, file size and open files",
                ) from error
        return Arena(self._last)


class _Memory:
    """Anonymous shared memory (memfd) of a fixed size; gone when both ends let go.

    It is sealed against shrinking, so that no peer can take pages away under a reader.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, _ALIGNMENT)
        self.descriptor = os.memfd_create("astraflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self._mapped = mmap.mmap(self.descriptor, self.nbytes)
        self.shared = np.frombuffer(self._mapped, np.uint8)
        self.user: Callable[[], object | None] = lambda: None

    @property
    def is_used(self) -> bool:
        return self.user() is not None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let the system have the pages that lie within some bytes."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._mapped.madvise(mmap.MADV_REMOVE, first, end - first)
