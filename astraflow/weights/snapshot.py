"""Snapshots: a version is copied range by range while later ones are written over it."""

from collections.abc import Generator, Sequence
from threading import Lock
from typing import Final

import numpy as np

from astraflow.codec.changes import Change
from astraflow.weights.state import HeldState, StagedState

BLOCK_NBYTES: Final = 1 << 20


class Snapshots:
    """Commits versions, and copies one of them while later ones are committed.

    Every change knows the bits that it takes the place of. A commit waits for one range that is
    being copied, never for the rest.
    """

    def __init__(self, *, block_nbytes: int = BLOCK_NBYTES) -> None:
        """Hold nothing.

        Args:
            block_nbytes: Of a range that is copied at once.
        """
        self._block_nbytes = block_nbytes
        self._lock = Lock()
        self._held: HeldState | None = None
        self._copied: HeldState | None = None
        self._changes: list[Change] = []

    def hold(self, held: HeldState | None) -> None:
        """Take a state that was not committed here."""
        with self._lock:
            self._held = held

    def commit(self, staged: StagedState) -> HeldState:
        """Write the changes of a version into the state."""
        with self._lock:
            if self._copied is not None and self._copied.flat is staged.state.flat:
                self._changes.extend(staged.changes)
            self._held = staged.commit()
            return self._held

    def begin(self) -> HeldState | None:
        """Return the version that is held now; `blocks` copies it. None: there is none."""
        with self._lock:
            self._copied, self._changes = self._held, []
            return self._held

    def blocks(self) -> Generator[np.ndarray]:
        """Yield what `begin` returned, by offset: u8[up to a block], copies."""
        held = self._copied
        try:
            flat = np.zeros(0, np.uint8) if held is None else held.flat
            for first in range(0, len(flat), self._block_nbytes):
                with self._lock:
                    changes = self._changes[::-1]
                    block = flat[first : first + self._block_nbytes].copy()
                _undo(block, first, changes)
                yield block
        finally:
            with self._lock:
                self._copied, self._changes = None, []


def _undo(block: np.ndarray, first: int, changes: Sequence[Change]) -> None:
    """Take changes back, the newest first."""
    for change in changes:
        itemsize = change.dtype.itemsize
        place = first // itemsize
        indices, part = change.between(place, place + len(block) // itemsize)
        bits = block[: len(block) // itemsize * itemsize].view(change.dtype.bits)
        bits[indices] = change.before[part]
