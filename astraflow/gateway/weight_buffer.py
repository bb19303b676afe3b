"""What both ends of the published lane agree on: a flat buffer of weights, its deltas, and pushes.

In the buffer every tensor comes in its order, end to end, without alignment. A delta is u64 changed
elements | u16 bytes per element | u16 flags (bit 0: 64-bit indices) | i32 reserved, the indices of
the flat buffer in elements, the new bits. A push is u64 offset | u64 length, then the bytes; one
byte 0x01 answers it. All of it is little-endian.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout, TensorSpec, TensorUpdate
from astraflow.weights.publish.tensors import TORCH_NAMES

PUSH_HEAD: Final = Struct("<QQ")
PUSH_ACK: Final = b"\x01"
_DELTA_HEAD: Final = Struct("<QHHi")
_WIDE: Final = 1
_ELEMENT_NBYTES: Final = 2
_DIMENSIONS: Final = 16
_DTYPES: Final = {name: dtype for dtype, name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """What `/get_buffer_info` says: tensors, at offsets from the start of the buffer."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Dtype, tuple[int, ...]]]) -> "BufferPlan":
        """Lay tensors out in the order given."""
        placed: list[TensorSpec] = []
        end = 0
        for name, dtype, shape in tensors:
            placed.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=end))
            end += placed[-1].nbytes
        return cls(tensors=tuple(placed), nbytes=end)

    @property
    def layout(self) -> Layout:
        """The same tensors, as the run lays them out."""
        return Layout.of([(each.name, each.dtype, each.shape) for each in self.tensors])

    @property
    def has_deltas(self) -> bool:
        """Whether every element has the two bytes that a delta is made of."""
        return all(each.dtype.itemsize == _ELEMENT_NBYTES for each in self.tensors)

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return every tensor's bits inside a flat buffer, u8[nbytes], as uN."""
        return {each.name: _view(flat, each) for each in self.tensors}

    def write(self, flat: np.ndarray, updates: Iterable[TensorUpdate]) -> None:
        """Write new bits of tensors into a flat buffer, u8[nbytes]."""
        places = {each.name: each for each in self.tensors}
        for update in updates:
            place = places[update.spec.name]
            part = flat[place.offset : place.offset + place.nbytes].view(place.dtype.bits)
            part[slice(None) if update.indices is None else update.indices] = update.values

    def updates(
        self, flat: np.ndarray, changed: np.ndarray | None = None
    ) -> tuple[TensorUpdate, ...]:
        """Return what a flat buffer, u8[nbytes], has of tensors.

        Args:
            flat: With copies of whose elements nothing is shared where `changed` is given.
            changed: i64[n], rising, elements of two bytes; None: all of every tensor.
        """
        found: list[TensorUpdate] = []
        for each in self.tensors:
            values, indices = _view(flat, each).reshape(-1), None
            if changed is not None and each.dtype.itemsize == _ELEMENT_NBYTES:
                first = each.offset // _ELEMENT_NBYTES
                begin, end = np.searchsorted(changed, (first, first + len(values)))
                indices = changed[begin:end] - first
                values = values[indices]
            if len(values):
                found.append(TensorUpdate(spec=each, indices=indices, values=values))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return it as published."""
        tensors = [[t.name, [list(t.shape), TORCH_NAMES[t.dtype]]] for t in self.tensors]
        return {"single_buffer_length": self.nbytes, "tensors_meta": tensors}


def read_plan(fields: Mapping[str, Any], max_nbytes: int) -> BufferPlan:
    """Read what a sender answers; its tensors have at most so many bytes.

    Raises:
        AstraflowError: LAYOUT_MISMATCH for what is none, a name that comes twice, or another
            length than its tensors', MESSAGE_TOO_LARGE.
    """
    try:
        tensors = [
            (str(name), _DTYPES[str(dtype).removeprefix("torch.")], _shape(shape))
            for name, (shape, dtype) in fields["tensors_meta"]
        ]
        plan, nbytes = BufferPlan.of(tensors), int(fields["single_buffer_length"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH, f"the sender's buffer info is none: {type(error).__name__}"
        ) from None
    if len({each.name for each in plan.tensors}) < len(plan.tensors):
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH, "the sender's buffer info names a tensor twice"
        )
    told = f"the sender's tensors take {plan.nbytes} bytes"
    if plan.nbytes != nbytes:
        raise AstraflowError(Reason.LAYOUT_MISMATCH, f"{told}, its buffer has another length")
    if nbytes > max_nbytes:
        why = f"{told}, http.max_weights_nbytes is {max_nbytes}"
        raise AstraflowError(Reason.MESSAGE_TOO_LARGE, why)
    return plan


def _shape(lengths: Any) -> tuple[int, ...]:
    shape = tuple(map(int, lengths))
    if len(shape) > _DIMENSIONS or any(not 0 <= each < 1 << 48 for each in shape):
        raise ValueError("no shape of a tensor")
    return shape


def _view(flat: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    part = flat[tensor.offset : tensor.offset + tensor.nbytes]
    if tensor.offset % tensor.dtype.itemsize:
        part = part.copy()
    return part.view(tensor.dtype.bits).reshape(tensor.shape)


def encode_delta(base: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, int]:
    """Return what turns one flat buffer, u16[n], into another, and how many elements change.

    Returns:
        u8[...], with 32-bit indices where they suffice.
    """
    changed = np.flatnonzero(base != target)
    is_wide = len(base) > 1 << 32
    indices = changed.astype(np.uint64 if is_wide else np.uint32)
    head = _DELTA_HEAD.pack(len(changed), _ELEMENT_NBYTES, _WIDE if is_wide else 0, 0)
    parts = (np.frombuffer(head, np.uint8), indices.view(np.uint8), target[changed].view(np.uint8))
    return np.concatenate(parts), len(changed)


def apply_delta(flat: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Change a flat buffer, u8[n], by a delta in place, or not at all.

    Returns:
        What changed: i64[...], rising, elements of two bytes.

    Raises:
        AstraflowError: CHUNK_INVALID when sizes contradict each other or an index lies outside.
    """
    if len(delta) < _DELTA_HEAD.size or len(flat) % _ELEMENT_NBYTES:
        raise _invalid("it is too short for its header")
    count, element_nbytes, flags, _ = _DELTA_HEAD.unpack(delta[: _DELTA_HEAD.size].tobytes())
    index = np.dtype("<u8" if flags & _WIDE else "<u4")
    values_at = _DELTA_HEAD.size + count * index.itemsize
    if element_nbytes != _ELEMENT_NBYTES or len(delta) != values_at + count * element_nbytes:
        raise _invalid(f"{len(delta)} bytes are not {count} elements of {element_nbytes} bytes")
    indices = delta[_DELTA_HEAD.size : values_at].copy().view(index)
    elements = flat.view(np.uint16)
    if count and int(indices.max()) >= len(elements):
        raise _invalid(f"index {indices.max()} lies outside of {len(elements)} elements")
    elements[indices] = delta[values_at:].copy().view(np.uint16)
    return np.unique(indices).astype(np.int64)


def _invalid(why: str) -> AstraflowError:
    return AstraflowError(Reason.CHUNK_INVALID, f"a delta of the published lane is unsound: {why}")
