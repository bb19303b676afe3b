"""Tensors of a policy: element types, where they lie in one flat array, what a version changes."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId


class Dtype(StrEnum):
    """An element type; multi-byte elements are little-endian.

    Attributes:
        itemsize: In bytes.
        numpy: For those that numpy lacks (bf16, fp8), the type of their bits.
        bits: The unsigned integer type of the same size: how weights are compared, bit by bit.
    """

    BOOL = "bool"
    I8 = "i8"
    U8 = "u8"
    I16 = "i16"
    U16 = "u16"
    I32 = "i32"
    U32 = "u32"
    I64 = "i64"
    U64 = "u64"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    F8_E4M3 = "f8_e4m3"
    F8_E5M2 = "f8_e5m2"

    itemsize: int
    numpy: np.dtype[np.generic]
    bits: np.dtype[np.unsignedinteger]

    @classmethod
    def of(cls, dtype: DTypeLike) -> "Dtype":
        """Return the element type of a numpy dtype; KeyError for one that has none here."""
        return _BY_NUMPY[np.dtype(dtype).newbyteorder("<")]


_NAMES = {
    Dtype.BOOL: "?",
    Dtype.I8: "i1",
    Dtype.U8: "u1",
    Dtype.I16: "<i2",
    Dtype.U16: "<u2",
    Dtype.I32: "<i4",
    Dtype.U32: "<u4",
    Dtype.I64: "<i8",
    Dtype.U64: "<u8",
    Dtype.F16: "<f2",
    Dtype.F32: "<f4",
    Dtype.F64: "<f8",
    # Their bits: numpy lacks these.
    Dtype.BF16: "<u2",
    Dtype.F8_E4M3: "u1",
    Dtype.F8_E5M2: "u1",
}

for _dtype, _name in _NAMES.items():
    _dtype.numpy = np.dtype(_name)
    _dtype.itemsize = _dtype.numpy.itemsize
    _dtype.bits = np.dtype(f"<u{_dtype.itemsize}")

_BITS_ALONE = (Dtype.BF16, Dtype.F8_E4M3, Dtype.F8_E5M2)
_BY_NUMPY = {dtype.numpy: dtype for dtype in Dtype if dtype not in _BITS_ALONE}

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor's place.

    Attributes:
        name: As in the Hugging Face checkpoint.
        dtype: Element type.
        shape: Empty for a scalar.
        offset: In bytes, a multiple of 64.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def element_count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.element_count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensors by offset, without overlap; equal for all versions of one architecture."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    def __post_init__(self) -> None:
        end = 0
        for spec in self.tensors:
            if spec.offset < end or spec.offset % ALIGNMENT or min(spec.shape, default=0) < 0:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"tensor {spec.name} at offset {spec.offset} overlaps or is not aligned",
                )
            end = spec.offset + spec.nbytes
        if end > self.nbytes:
            raise AstraflowError(Reason.INVALID_FIELD, f"layout of {self.nbytes} bytes needs {end}")

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Dtype, tuple[int, ...]]]) -> "Layout":
        """Lay out tensors in order of name, each on a 64-byte boundary."""
        specs: list[TensorSpec] = []
        end = 0
        for name, dtype, shape in sorted(tensors):
            specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=end))
            end += -(-specs[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tensors=tuple(specs), nbytes=end)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """Return one tensor's bits inside the flat array: no copy.

        Args:
            flat: u8[nbytes].
            name: Of the tensor.

        Returns:
            Unsigned integers of the element size, in the tensor's shape.
        """
        spec = self.by_name[name]
        part = flat[spec.offset : spec.offset + spec.nbytes]
        return part.view(spec.dtype.bits).reshape(spec.shape)

    def canonical(self, dtype_numbers: Mapping[Dtype, int]) -> bytes:
        """Return the canonical form of `weights/v1/layout.proto`; its BLAKE3 is the digest.

        Args:
            dtype_numbers: Numbers of the wire's enum, which this floor does not know.
        """
        parts = [_u64(len(self.tensors))]
        for spec in self.tensors:
            name = spec.name.encode()
            parts += [_u64(len(name)), name, _u64(dtype_numbers[spec.dtype])]
            parts += [_u64(len(spec.shape)), *map(_u64, spec.shape)]
            parts += [_u64(spec.offset), _u64(spec.nbytes)]
        return b"".join([*parts, _u64(self.nbytes), _u64(0)])


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorUpdate:
    """New bits of one tensor: all of them, or those of some elements.

    Absolute values, so applying an update twice is harmless.

    Attributes:
        spec: The tensor.
        indices: i64[n] of the flattened tensor, rising; None: every element.
        values: Bits (unsigned integers of the element size), [n] or [element_count].
    """

    spec: TensorSpec
    indices: np.ndarray | None
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """What turns the live weights of a policy into a version.

    Attributes:
        policy_id: Whose weights.
        version: What they are afterwards.
        base_version: What they must be before; None: anything, all tensors are dense.
        tensors: Only those that change.
    """

    policy_id: PolicyId
    version: int
    base_version: int | None
    tensors: tuple[TensorUpdate, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """How a swap went.

    Attributes:
        version: Now live.
        pause_s: Seconds in which the engine decoded nothing for the swap.
        inflight_count: Generations that went on across it.
    """

    version: int
    pause_s: float
    inflight_count: int
