"""Shared tables of a compact patch: for each dtype its classes and their frequencies.

    u8  section_count
    per section, by name of the dtype:
        u8  name_nbytes, then the name ("bf16")
        u16 low, u8 class_count            see `exponents.ClassRule`
        tables of the gaps of each class, then of the distances of each   see `tables`

An empty field has no sections. A dtype without section has no SPARSE_COMPACT chunks.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from astraflow.codec.exponents import MAX_CLASS_COUNT, ClassRule, field_of
from astraflow.codec.tables import FrequencyTables, read_tables
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason

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
        """Return the section."""
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
        raise AstraflowError(
            Reason.CHUNK_INVALID, f"the tables of a patch cannot be read: {error}"
        ) from None


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
