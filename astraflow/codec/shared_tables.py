"""Shared tables of a compact patch: for each dtype its classes and their frequencies.

    u8  section_count
    per section, by name of the dtype:
        u8  name_nbytes, then the name ("bf16")
        u16 low, u8 class_count            see `ClassRule`
        tables of the gaps of each class, then of the distances of each   see `rans`

An empty field has no sections. A dtype without section has no SPARSE_COMPACT chunks.

A change is the likelier the finer the value: an optimizer's step crosses more units of the last
place. Elements are therefore sorted into classes by the exponent of their value in the base.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from astraflow.codec import kernels
from astraflow.codec.chunks import chunk_invalid
from astraflow.codec.rans import FrequencyTables, read_tables
from astraflow.core.tensors import Dtype

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
    level = kernels.level()
    shift, field = field_of(dtype)
    if level >= 0:
        histogram = np.zeros(field + 1, np.uint32)
        kernels.loops.exponents(level, old, new, dtype.itemsize, shift, field, histogram)
        return histogram.astype(np.int64)
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
    # Measured on weights of N(0, 0.02): where the bytes saved pass those of the tables.
    steps = ((16384, MAX_CLASS_COUNT), (1536, 12), (512, 1))
    count = next((count for least, count in steps if changed_count >= least), 0)
    if not count:
        return None
    # The largest exponents hardly change, and a class for each would be lost on them.
    above = np.cumsum(histogram[::-1])[::-1]
    highest = int(np.flatnonzero(above > above[0] // 1024)[-1]) if above[0] else 0
    low = max(0, highest - count + 1)
    return ClassRule(dtype=dtype, low=low, class_count=min(count, highest - low + 1))


_RULE: Final = struct.Struct("<HB")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassTables:
    """The classes of one dtype.

    Attributes:
        rule: How elements are sorted.
        tables: 32: gaps of class 0 to 15, then distances of class 0 to 15.
    """

    rule: ClassRule
    tables: FrequencyTables

    @classmethod
    def of(cls, rule: ClassRule, histogram: np.ndarray) -> "ClassTables":
        """Make tables from how often each token occurs: u32[2, 16, 256]."""
        counts = histogram.reshape(2 * MAX_CLASS_COUNT, 256).astype(np.int64)
        return cls(rule=rule, tables=FrequencyTables.of(counts))

    def to_bytes(self) -> bytes:
        name = self.rule.dtype.value.encode()
        count = self.rule.class_count
        used = self.tables.frequencies.reshape(2, MAX_CLASS_COUNT, 256)[:, :count]
        body = FrequencyTables(frequencies=used.reshape(2 * count, 256)).to_bytes()
        return bytes((len(name),)) + name + _RULE.pack(self.rule.low, count) + body


def write_shared_tables(sections: Iterable[ClassTables]) -> bytes:
    """Return the field of a patch; no sections: nothing."""
    parts = sorted(section.to_bytes() for section in sections)
    return bytes((len(parts),)) + b"".join(parts) if parts else b""


@lru_cache(maxsize=8)
def read_shared_tables(data: bytes) -> Mapping[Dtype, ClassTables]:
    """Read the field of a patch.

    Raises:
        AstraflowError: CHUNK_INVALID when it contradicts itself.
    """
    try:
        return _read(memoryview(data)) if data else {}
    except (ValueError, IndexError, struct.error) as error:
        raise chunk_invalid(f"the tables of a patch cannot be read: {error}") from None


def _read(data: memoryview) -> Mapping[Dtype, ClassTables]:
    sections: dict[Dtype, ClassTables] = {}
    at = 1
    for _ in range(data[0]):
        section, at = _read_section(data, at)
        sections[section.rule.dtype] = section
    if at != len(data) or not 0 < len(sections) == data[0]:
        raise ValueError("has bytes behind its end, no dtype, or one twice")
    return sections


def _read_section(data: memoryview, at: int) -> tuple[ClassTables, int]:
    end = at + 1 + data[at]
    dtype = Dtype(bytes(data[at + 1 : end]).decode("ascii"))
    low, count = _RULE.unpack_from(data, end)
    if not 1 <= count <= MAX_CLASS_COUNT or low > field_of(dtype)[1]:
        raise ValueError("has classes that its dtype cannot have")
    end += _RULE.size
    tables, nbytes = read_tables(data[end:], 2 * count)
    rows = np.zeros((2, MAX_CLASS_COUNT, 256), np.uint16)
    rows[:, :count] = tables.frequencies.reshape(2, count, 256)
    rule = ClassRule(dtype=dtype, low=low, class_count=count)
    frequencies = rows.reshape(2 * MAX_CLASS_COUNT, 256)
    return ClassTables(rule=rule, tables=FrequencyTables(frequencies=frequencies)), end + nbytes
