"""Exponents: what of an element's bits says how far apart neighbouring values are.

A change is the likelier the finer the value: an optimizer's step crosses more units of the last
place. Elements are therefore sorted into classes by the exponent of their value in the base.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from astraflow.core.dtype import Dtype

MAX_CLASS_COUNT: Final = 16

# Bits below the exponent, and its field; integers have none and are one class.
_FIELDS: Final = {
    Dtype.BF16: (7, 0xFF),
    Dtype.F16: (10, 0x1F),
    Dtype.F32: (23, 0xFF),
    Dtype.F64: (52, 0x7FF),
    Dtype.F8_E4M3: (3, 0xF),
    Dtype.F8_E5M2: (2, 0x1F),
}


def field_of(dtype: Dtype) -> tuple[int, int]:
    """Return by how much to shift right, and the mask that leaves the exponent; integers: 0, 0."""
    return _FIELDS.get(dtype, (0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """How elements of one dtype are sorted: class 0 is the exponent `low` and all below it.

    Attributes:
        dtype: Of the elements.
        low: Exponent of the first class.
        class_count: The last class is `low + class_count - 1` and all above it.
    """

    dtype: Dtype
    low: int
    class_count: int

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As the kernels want it: shift, field, low, last class."""
        return (*field_of(self.dtype), self.low, self.class_count - 1)

    def classes(self, bits: np.ndarray) -> np.ndarray:
        """Return the class of each element: uN[n] to u8[n]."""
        shift, field, low, top = self.arguments
        exponents = (bits >> bits.dtype.type(shift)) & bits.dtype.type(field)
        above = np.maximum(exponents, bits.dtype.type(low)) - bits.dtype.type(low)
        return np.minimum(above, bits.dtype.type(top)).astype(np.uint8)


def exponent_histogram(dtype: Dtype, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Count the exponents in the base of what changed: uN[n] twice to i64[field + 1]."""
    shift, field = field_of(dtype)
    before = old[new != old]
    exponents = (before >> before.dtype.type(shift)) & before.dtype.type(field)
    return np.bincount(exponents.astype(np.int64), minlength=field + 1)


def rule_for(dtype: Dtype, histogram: np.ndarray, changed_count: int) -> ClassRule | None:
    """Choose classes that are worth their tables; None: nothing is.

    Args:
        dtype: Of the elements.
        histogram: i64[field + 1], of a sample of the changes.
        changed_count: In the whole patch, about.
    """
    count = _class_count(changed_count)
    if not count:
        return None
    # The largest exponents hardly change, and a class for each would be lost on them.
    above = np.cumsum(histogram[::-1])[::-1]
    highest = int(np.flatnonzero(above > above[0] // 1024)[-1]) if above[0] else 0
    low = max(0, highest - count + 1)
    return ClassRule(dtype=dtype, low=low, class_count=min(count, highest - low + 1))


def _class_count(changed_count: int) -> int:
    # Measured on weights of N(0, 0.02): where the bytes saved pass those of the tables.
    for least, count in ((16384, MAX_CLASS_COUNT), (1536, 12), (512, 1)):
        if changed_count >= least:
            return count
    return 0
