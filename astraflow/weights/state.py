"""The held state: a verified version as one flat array. The next one is staged beside it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk, ChunkHeader
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.updates import TensorUpdate
from astraflow.core.versions import PatchInfo
from astraflow.weights.frame import Frame
from astraflow.weights.tensor_updates import changed_indices, dense_updates, sparse_updates

CompletePatch = tuple[PatchInfo, tuple[Chunk, ...]]
"""A patch whose chunks, by index, were verified."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldState:
    """What a receiver holds.

    Attributes:
        frame: Of all versions of the layout.
        version: Whose bits these are.
        flat: u8[nbytes].
        digest: Of the state.
    """

    frame: Frame
    version: int
    flat: np.ndarray
    digest: StateDigest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedState:
    """A verified version beside the held one.

    Attributes:
        state: What is held once the changes are written into `state.flat`, which until then
            may be the held version's.
        changes: In the order in which they are written.
        indices: Elements that change by tensor; None: the version came whole.
    """

    state: HeldState
    changes: tuple[Change, ...]
    indices: Mapping[str, np.ndarray] | None

    def commit(self) -> HeldState:
        """Write the changes and return what is held now; nothing here can fail halfway."""
        for change in self.changes:
            change.apply(self.state.flat)
        return self.state

    def tensor_updates(self) -> tuple[TensorUpdate, ...]:
        """Return what a committed version asks of an engine."""
        layout, flat = self.state.frame.layout, self.state.flat
        if self.indices is None:
            return dense_updates(layout, flat)
        return sparse_updates(layout, flat, self.indices)


def stage(
    frame: Frame,
    held: HeldState | None,
    patches: Iterable[CompletePatch],
    content_digests: Mapping[int, bytes],
) -> StagedState:
    """Decode patches over a base, which is not touched, and verify every state on the way.

    Args:
        frame: Of the target's layout.
        held: The base; None: the first patch is from nothing.
        patches: In order.
        content_digests: By version, as the run registered them.

    Raises:
        AstraflowError: CHUNK_INVALID; DIGEST_MISMATCH when a state is not the registered one.
    """
    todo = list(patches)
    base = held
    if base is None:
        info, chunks = todo.pop(0)
        base = _whole(frame, info.version, chunks)
        _require(base.digest, info.version, content_digests)
    overlay, digest, version = Overlay(base.flat), base.digest, base.version
    for info, chunks in todo:
        layer = _decode(frame, chunks, overlay)
        for change in layer:
            digest = digest.after(change)
        _require(digest, info.version, content_digests)
        overlay.add(layer)
        version = info.version
    changes = overlay.changes
    indices = changed_indices(frame, changes)
    return StagedState(
        state=HeldState(frame=frame, version=version, flat=base.flat, digest=digest),
        changes=changes,
        indices=None if held is None else indices,
    )


class Overlay:
    """A base with the changes of some patches laid over it, without a copy of the base."""

    def __init__(self, flat: np.ndarray) -> None:
        self._flat = flat
        self._layers: list[tuple[list[int], Sequence[Change]]] = []

    @property
    def changes(self) -> tuple[Change, ...]:
        """All of them, oldest first."""
        return tuple(change for _, layer in self._layers for change in layer)

    def add(self, layer: Sequence[Change]) -> None:
        """Lay the changes of one patch on top: rising, without overlap."""
        starts = [int(each.positions[0]) * each.dtype.itemsize for each in layer]
        self._layers.append((starts, layer))

    def bits(self, header: ChunkHeader) -> np.ndarray:
        """Return the bits of a chunk's range: uN[element_count]; not to be written."""
        bits = self._flat[header.offset : header.end].view(header.dtype.bits)
        first = header.offset // header.dtype.itemsize
        is_copy = False
        for change in self._touching(header):
            bounds = (first, first + len(bits))
            start, end = np.searchsorted(change.positions, bounds)
            bits = bits if is_copy else bits.copy()
            is_copy = True
            bits[change.positions[start:end] - first] = change.values[start:end]
        return bits

    def _touching(self, header: ChunkHeader) -> Iterator[Change]:
        for starts, layer in self._layers:
            at = max(bisect_right(starts, header.offset) - 1, 0)
            while at < len(layer) and starts[at] < header.end:
                if layer[at].dtype is header.dtype:
                    yield layer[at]
                at += 1


def _decode(frame: Frame, chunks: tuple[Chunk, ...], overlay: Overlay) -> list[Change]:
    frame.runs.check_cover([chunk.header for chunk in chunks])
    found = (decode_change(chunk, overlay.bits(chunk.header)) for chunk in chunks)
    return [change for change in found if change is not None]


def _whole(frame: Frame, version: int, chunks: tuple[Chunk, ...]) -> HeldState:
    frame.runs.check_cover([chunk.header for chunk in chunks])
    flat = np.zeros(frame.layout.nbytes, np.uint8)
    for chunk in chunks:
        part = flat[chunk.header.offset : chunk.header.end]
        part.view(chunk.header.dtype.bits)[:] = decode_whole(chunk)
    frame.check_padding(flat)
    digest = StateDigest.of(frame.layout, flat)
    return HeldState(frame=frame, version=version, flat=flat, digest=digest)


def _require(digest: StateDigest, version: int, registered: Mapping[int, bytes]) -> None:
    if digest.to_bytes() != registered[version]:
        raise AstraflowError(
            Reason.DIGEST_MISMATCH,
            f"what resulted is not version {version}: base or patch is not what the run registered",
            metadata={"version": str(version)},
        )
