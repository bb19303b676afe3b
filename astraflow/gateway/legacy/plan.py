"""The flat buffer of a sender: every tensor in its order, end to end, without alignment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.updates import TensorUpdate

TORCH_NAMES: Final[Mapping[str, Dtype]] = {
    "bfloat16": Dtype.BF16,
    "float16": Dtype.F16,
    "float32": Dtype.F32,
    "float64": Dtype.F64,
    "float8_e4m3fn": Dtype.F8_E4M3,
    "float8_e5m2": Dtype.F8_E5M2,
    "uint8": Dtype.U8,
    "int8": Dtype.I8,
    "int32": Dtype.I32,
    "int64": Dtype.I64,
}
_NAMES: Final = {dtype: name for name, dtype in TORCH_NAMES.items()}
_DIMENSIONS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor's place: in bytes from the start of the buffer."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """What `/get_buffer_info` says."""

    tensors: tuple[PlannedTensor, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Dtype, tuple[int, ...]]]) -> "BufferPlan":
        """Lay tensors out in the order given."""
        placed: list[PlannedTensor] = []
        end = 0
        for name, dtype, shape in tensors:
            placed.append(PlannedTensor(name=name, dtype=dtype, shape=shape, offset=end))
            end += placed[-1].nbytes
        return cls(tensors=tuple(placed), nbytes=end)

    @property
    def layout(self) -> Layout:
        """The same tensors, as the run lays them out."""
        return Layout.of([(each.name, each.dtype, each.shape) for each in self.tensors])

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return every tensor's bits inside a flat buffer, u8[nbytes], as uN."""
        return {each.name: _view(flat, each) for each in self.tensors}

    @property
    def has_deltas(self) -> bool:
        """Whether every element has the two bytes that a delta is made of."""
        return all(each.dtype.itemsize == 2 for each in self.tensors)

    def write(self, flat: np.ndarray, updates: Iterable[TensorUpdate]) -> None:
        """Write new bits of tensors into a flat buffer, u8[nbytes]."""
        places = {each.name: each for each in self.tensors}
        for update in updates:
            place = places[update.spec.name]
            part = flat[place.offset : place.offset + place.nbytes].view(place.dtype.bits)
            if update.indices is None:
                part[:] = update.values
            else:
                part[update.indices] = update.values

    def to_json(self) -> dict[str, Any]:
        """Return it as published."""
        tensors = [[t.name, [list(t.shape), _NAMES[t.dtype]]] for t in self.tensors]
        return {"single_buffer_length": self.nbytes, "tensors_meta": tensors}


def read_plan(fields: Mapping[str, Any], max_nbytes: int) -> BufferPlan:
    """Read what a sender answers.

    Args:
        fields: As published.
        max_nbytes: Of all tensors.

    Raises:
        AstraflowError: LAYOUT_MISMATCH for what is none, or another length than its tensors',
            MESSAGE_TOO_LARGE.
    """
    try:
        plan = BufferPlan.of(
            [
                (str(name), TORCH_NAMES[str(dtype).removeprefix("torch.")], _shape(shape))
                for name, (shape, dtype) in fields["tensors_meta"]
            ]
        )
        nbytes = int(fields["single_buffer_length"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH, f"the sender's buffer info is none: {type(error).__name__}"
        ) from None
    if plan.nbytes != nbytes:
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH,
            f"the sender's tensors take {plan.nbytes} bytes, its buffer has another length",
        )
    if nbytes > max_nbytes:
        raise AstraflowError(
            Reason.MESSAGE_TOO_LARGE,
            f"the sender's tensors take {nbytes} bytes, http.max_weights_nbytes is {max_nbytes}",
        )
    return plan


def _shape(lengths: Any) -> tuple[int, ...]:
    shape = tuple(map(int, lengths))
    if len(shape) > _DIMENSIONS or any(not 0 <= each < 1 << 48 for each in shape):
        raise ValueError("no shape of a tensor")
    return shape


def _view(flat: np.ndarray, tensor: PlannedTensor) -> np.ndarray:
    part = flat[tensor.offset : tensor.offset + tensor.nbytes]
    if tensor.offset % tensor.dtype.itemsize:
        part = part.copy()
    return part.view(tensor.dtype.bits).reshape(tensor.shape)
