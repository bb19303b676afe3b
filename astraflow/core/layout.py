"""Layouts: where the tensors of a policy lie in one flat array of bytes."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason

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
        """Product of the shape."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Product of the shape times the element size."""
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
        """The tensors by name."""
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
