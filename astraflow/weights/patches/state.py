"""The held state: a verified version as one flat array. The next one is staged beside it.

What a staged version asks of an engine are updates of tensors, sparse or whole.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk, ChunkHeader
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout, TensorSpec, TensorUpdate
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch
from astraflow.wire.weights import PatchIndex

Touched = tuple[np.ndarray, np.ndarray | None]
"""Elements of one tensor that change: i64[n], rising, and the bits that they get, uN[n].

Without these an element changes more than once.
"""


def dense_updates(layout: Layout, flat: np.ndarray) -> tuple[TensorUpdate, ...]:
    """Return every tensor whole; the values are views."""
    return tuple(
        TensorUpdate(spec=spec, indices=None, values=layout.view(flat, spec.name).reshape(-1))
        for spec in layout.tensors
    )


def _is_most(indices: np.ndarray, element_count: int) -> bool:
    return 2 * len(indices) > element_count


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], element_count: int) -> Touched:
    if len(parts) == 1:
        return parts[0]
    indices = np.concatenate([each for each, _ in parts])
    if (indices[1:] > indices[:-1]).all():
        return indices, np.concatenate([each for _, each in parts])
    # Several times as fast as np.unique, which makes a table of them. A mark for each element
    # takes no more memory than the indices here, and less time than to sort them.
    if len(indices) * indices.itemsize >= element_count:
        is_touched = np.zeros(element_count, np.bool_)
        is_touched[indices] = True
        return np.flatnonzero(is_touched), None
    indices.sort()
    is_first = np.ones(len(indices), np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=is_first[1:])
    return indices[is_first], None


Decode = Callable[[Chunk, np.ndarray, bytes], Change | None]
"""`decode_change`, or what knows some of its results."""

_Step = Sequence[Patch]
"""What leads from one version to another: one patch, or the patches of all shards."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldState:
    """What a receiver holds: the bits of a version."""

    frame: ShardLayout
    version: int
    flat: np.ndarray  # u8[nbytes]
    digest: StateDigest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedState:
    """A verified version beside the held one.

    Attributes:
        state: What is held once the changes are written into `state.flat`, which until then
            may be the held version's.
        changes: In the order in which they are written.
        touched: Elements that change by tensor; None: the version came whole.
    """

    state: HeldState
    changes: tuple[Change, ...]
    touched: Mapping[str, Touched] | None

    def commit(self) -> HeldState:
        """Write the changes and return what is held now; nothing here can fail halfway."""
        for change in self.changes:
            change.apply(self.state.flat)
        return self.state

    @property
    def is_given_by_changes(self) -> bool:
        """Whether what it asks of an engine is known before it is committed."""
        specs = self.state.frame.layout.by_name
        return self.touched is not None and all(
            values is not None and not _is_most(indices, specs[name].element_count)
            for name, (indices, values) in self.touched.items()
        )

    def tensor_updates(self) -> tuple[TensorUpdate, ...]:
        """Return what the version asks of an engine, committed or told by its changes.

        A tensor of which most changed comes whole. Values are views of the state where the version
        came whole, and arrays of their own otherwise.
        """
        layout, flat = self.state.frame.layout, self.state.flat
        if self.touched is None:
            return dense_updates(layout, flat)
        updates: list[TensorUpdate] = []
        for spec in layout.tensors:
            found = self.touched.get(spec.name)
            if found is None:
                continue
            bits, (indices, values) = layout.view(flat, spec.name).reshape(-1), found
            if _is_most(indices, len(bits)):
                updates.append(TensorUpdate(spec=spec, indices=None, values=bits.copy()))
            else:
                values = bits[indices] if values is None else values
                updates.append(TensorUpdate(spec=spec, indices=indices, values=values))
        return tuple(updates)


class GrowingState:
    """A version that comes from nothing: chunks are decoded into it in any order.

    Attributes:
        flat: u8[nbytes]: zeros where nothing was filled in.
        filled: Indexes of the chunks that are in it, by root of their patch.
    """

    def __init__(self, frame: ShardLayout) -> None:
        self.frame = frame
        self.flat = np.zeros(frame.layout.nbytes, np.uint8)
        self.filled: dict[bytes, set[int]] = {}

    def fill(self, index: PatchIndex, chunk: Chunk) -> np.ndarray:
        """Decode a verified chunk, unless it is there, and return the bytes of its range: u8[n]."""
        header, filled = chunk.header, self.filled.setdefault(index.patch.root_digest, set())
        part = self.flat[header.offset : header.end]
        if header.index not in filled:
            part.view(header.dtype.bits)[:] = decode_whole(chunk)
            filled.add(header.index)
        return part


def stage(
    frame: ShardLayout,
    held: HeldState | None,
    patches: Iterable[Patch],
    content_digests: Mapping[int, bytes],
    decode: Decode = decode_change,
    *,
    growing: GrowingState | None = None,
) -> StagedState:
    """Decode patches over a base, which is not touched, and verify every state on the way.

    Args:
        frame: Of the layout.
        held: The base; None: the first patch is from nothing.
        patches: Verified, complete, in order; those of the shards of a version side by side.
        content_digests: By version, as the run registered them.
        decode: Returns what a chunk changes.
        growing: Has chunks of the patch from nothing already, and becomes the state.

    Raises:
        AstraflowError: CHUNK_INVALID; DIGEST_MISMATCH when a state is not the registered one.
    """
    steps = [[*step] for _, step in groupby(patches, key=lambda each: each.info.version)]
    base = held
    if base is None:
        base = _whole(frame, steps.pop(0), growing or GrowingState(frame))
        _require(base.digest, base.version, content_digests)
    overlay, digest, version = Overlay(base.flat), base.digest, base.version
    for step in steps:
        decoded = (
            decode(chunk, overlay.bits(chunk.header), index.shared_tables)
            for chunk, index in _covering(frame, step)
        )
        layer = [change for change in decoded if change is not None]
        for change in layer:
            digest = digest.after(change)
        version = step[0].info.version
        _require(digest, version, content_digests)
        overlay.add(layer)
    # What belongs to no tensor is refused here, also where nobody asks what changed.
    pieces = [(change, *piece) for change in overlay.changes for piece in frame.split(change)]
    return StagedState(
        state=HeldState(frame=frame, version=version, flat=base.flat, digest=digest),
        changes=overlay.changes,
        touched=None if held is None else _touched(pieces),
    )


def _touched(pieces: Iterable[tuple[Change, TensorSpec, slice]]) -> Mapping[str, Touched]:
    """Return the elements that parts of changes touch, by tensor."""
    found: dict[TensorSpec, list[tuple[np.ndarray, np.ndarray]]] = {}
    for change, spec, part in pieces:
        indices = change.indices[part].astype(np.int64)
        indices += change.first - spec.offset // spec.dtype.itemsize
        found.setdefault(spec, []).append((indices, change.values[part]))
    return {spec.name: _joined(parts, spec.element_count) for spec, parts in found.items()}


class Overlay:
    """A base with the changes of some patches laid over it, without a copy of the base."""

    def __init__(self, flat: np.ndarray) -> None:
        self._flat = flat
        self._layers: list[tuple[list[int], Sequence[Change]]] = []

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(change for _, layer in self._layers for change in layer)

    def add(self, layer: Sequence[Change]) -> None:
        """Lay the changes of one patch on top: rising, without overlap."""
        starts = [(each.first + int(each.indices[0])) * each.dtype.itemsize for each in layer]
        self._layers.append((starts, layer))

    def bits(self, header: ChunkHeader) -> np.ndarray:
        """Return the bits of a chunk's range: uN[element_count]; not to be written."""
        bits = flat_bits(self._flat)(header)
        first = header.offset // header.dtype.itemsize
        is_copy = False
        for starts, layer in self._layers:
            at = max(bisect_right(starts, header.offset) - 1, 0)
            for change in layer[at : bisect_left(starts, header.end)]:
                if change.dtype is header.dtype:
                    indices, part = change.between(first, first + len(bits))
                    bits = bits if is_copy else bits.copy()
                    is_copy = True
                    bits[indices] = change.values[part]
        return bits


def _whole(frame: ShardLayout, step: _Step, growing: GrowingState) -> HeldState:
    for chunk, index in _covering(frame, step):
        growing.fill(index, chunk)
    frame.check_padding(growing.flat)
    digest, version = StateDigest.of(frame.layout, growing.flat), step[0].info.version
    return HeldState(frame=frame, version=version, flat=growing.flat, digest=digest)


def _covering(frame: ShardLayout, step: _Step) -> list[tuple[Chunk, PatchIndex]]:
    """Return the chunks of a step by offset, with their patches: together they cover the layout."""
    found = [(chunk, patch.index) for patch in step for chunk in patch.in_order()]
    if len(step) > 1:
        # Shards lie between each other; the padding between tensors belongs to none of them.
        found.sort(key=lambda each: each[0].header.offset)
        frame.check_pieces([chunk.header for chunk, _ in found])
    else:
        frame.check_cover([chunk.header for chunk, _ in found])
    return found


def _require(digest: StateDigest, version: int, registered: Mapping[int, bytes]) -> None:
    if digest.to_bytes() != registered[version]:
        raise AstraflowError(
            Reason.DIGEST_MISMATCH,
            f"what resulted is not version {version}: base or patch is not what the run registered",
            metadata={"version": str(version)},
        )
