"""The held state: a verified version as one flat array, moved forward in place or not at all."""

from collections.abc import Iterable
from typing import Self

import numpy as np

from astraflow.codec.chunks import Chunk
from astraflow.codec.decode import Change, decode_chunk
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.updates import TensorUpdate
from astraflow.core.versions import VersionInfo
from astraflow.weights.flat import dense_updates, elements, tensor_updates
from astraflow.wire.patches import PatchIndex

Patches = Iterable[tuple[PatchIndex, tuple[Chunk, ...]]]


class HeldState:
    """What a receiver holds.

    Attributes:
        version: -1 before the first.
        flat: u8[nbytes].
    """

    def __init__(
        self, layout: Layout, flat: np.ndarray, *, version: int, digest: StateDigest
    ) -> None:
        self.version = version
        self.flat = flat
        self._layout = layout
        self._digest = digest

    @classmethod
    def empty(cls, layout: Layout) -> Self:
        """Return a state without a version."""
        flat = np.zeros(layout.nbytes, np.uint8)
        return cls(layout, flat, version=-1, digest=StateDigest())

    def advance(self, target: VersionInfo, patches: Patches) -> tuple[TensorUpdate, ...]:
        """Apply verified patches and return what they ask of each tensor.

        Args:
            target: What the patches lead to; its state digest is what counts.
            patches: In order, each with all its chunks.

        Raises:
            AstraflowError: CHUNK_INVALID, DIGEST_MISMATCH; the state is as it was before.
        """
        done: list[tuple[Change, np.ndarray]] = []
        is_first = self.version < 0
        try:
            for index, chunks in patches:
                has_base = index.patch.base_version is not None
                for chunk in chunks:
                    change = decode_chunk(chunk, self.flat if has_base else None)
                    if change is not None:
                        done.append((change, self._write(change)))
            digest = self._digest_after(done, is_first=is_first)
            _require_digest(digest, target)
        except AstraflowError:
            for change, before in reversed(done):
                elements(self.flat, change.dtype)[change.positions] = before
            raise
        self.version, self._digest = target.version, digest
        if is_first:
            return dense_updates(self._layout, self.flat)
        return tensor_updates(self._layout, self.flat, (change for change, _ in done))

    def _write(self, change: Change) -> np.ndarray:
        """Write new bits; return those that were there."""
        view = elements(self.flat, change.dtype)
        before = view[change.positions]
        view[change.positions] = change.values
        return before

    def _digest_after(
        self, done: list[tuple[Change, np.ndarray]], *, is_first: bool
    ) -> StateDigest:
        if is_first:
            return StateDigest.of(self._layout, self.flat)
        return self._digest.changed(done)


def _require_digest(digest: StateDigest, target: VersionInfo) -> None:
    if digest.to_bytes() != target.content_digest:
        raise AstraflowError(
            Reason.DIGEST_MISMATCH,
            f"what resulted is not version {target.version}: base or patch is not what the run "
            "registered",
        )
