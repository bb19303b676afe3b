"""Element types of tensors, on the wire and in checkpoints."""

from enum import StrEnum

import numpy as np
from numpy.typing import DTypeLike


class Dtype(StrEnum):
    """An element type; multi-byte elements are little-endian."""

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

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZES[self]

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer type of the same size: how weights are compared, bit by bit."""
        return _BITS[self]

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type; for those that numpy lacks (bf16, fp8), the type of their bits."""
        return _NUMPY[self]

    @classmethod
    def of(cls, dtype: DTypeLike) -> "Dtype":
        """Return the element type of a numpy dtype; KeyError for one that has none here."""
        return _BY_NUMPY[np.dtype(dtype).newbyteorder("<")]


_ITEMSIZES = {
    Dtype.BOOL: 1,
    Dtype.I8: 1,
    Dtype.U8: 1,
    Dtype.I16: 2,
    Dtype.U16: 2,
    Dtype.I32: 4,
    Dtype.U32: 4,
    Dtype.I64: 8,
    Dtype.U64: 8,
    Dtype.F16: 2,
    Dtype.BF16: 2,
    Dtype.F32: 4,
    Dtype.F64: 8,
    Dtype.F8_E4M3: 1,
    Dtype.F8_E5M2: 1,
}

_BITS = {dtype: np.dtype(f"<u{nbytes}") for dtype, nbytes in _ITEMSIZES.items()}

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
}

_NUMPY: dict[Dtype, np.dtype[np.generic]] = {
    dtype: np.dtype(_NAMES[dtype]) if dtype in _NAMES else bits for dtype, bits in _BITS.items()
}

_BY_NUMPY = {np.dtype(name): dtype for dtype, name in _NAMES.items()}
