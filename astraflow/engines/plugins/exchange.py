"""Exchange files: one update, handed to another process on this host through shared memory.

A file is `MAGIC`, the length of the header (u64), the header (JSON) and the arrays, each on a
64-byte boundary. The header says

    {"version": 7, "base_version": 6, "tensors": [{"name": "model.norm.weight", "dtype": "bf16",
     "shape": [64], "count": 2, "indices": 0, "values": 64}]}

where `indices` (i64[count], rising, of the flattened tensor; null: every element) and `values`
(bits, count elements of the type) are offsets from the first boundary behind the header. Numbers
are little-endian.
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"astraflow-update-1\n"
ALIGNMENT = 64
ITEMSIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f8_e4m3": 1, "f8_e5m2": 1}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class TensorPart:
    """What changes in one tensor.

    Attributes:
        name: As in the Hugging Face checkpoint.
        dtype: Of the elements, such as bf16.
        indices: i64[n] of the flattened tensor, rising; None: every element.
        values: Bits, uN[n].
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: np.ndarray | None
    values: np.ndarray


@dataclass(frozen=True)
class Update:
    """What a file holds; its arrays are those of the file, which nothing may change.

    Attributes:
        version: What the weights are afterwards.
        base_version: What they must be before; None: anything, and all of them come.
        parts: By tensor.
    """

    version: int
    base_version: int | None
    parts: tuple[TensorPart, ...]


def read_update(path: str | Path) -> Update:
    """Map a file.

    Raises:
        ValueError: It is none, or is cut off.
    """
    with Path(path).open("rb") as file:
        # Pages of our own if somebody writes to them, which nobody does: torch wants it so.
        flat = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    start = len(MAGIC) + 8
    if flat[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(f"{path} is no update of astraflow")
    length = int.from_bytes(flat[len(MAGIC) : start].tobytes(), "little")
    header: dict[str, Any] = json.loads(flat[start : start + length].tobytes())
    arrays = flat[aligned(start + length) :]
    return Update(
        version=header["version"],
        base_version=header["base_version"],
        parts=tuple(_part(arrays, entry) for entry in header["tensors"]),
    )


def aligned(offset: int) -> int:
    """Return the first boundary at or behind an offset."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _part(arrays: np.ndarray, entry: Mapping[str, Any]) -> TensorPart:
    count, bits = entry["count"], _BITS[ITEMSIZES[entry["dtype"]]]
    indices = None
    if entry["indices"] is not None:
        indices = _array(arrays, entry["indices"], count, np.dtype("<i8"))
    return TensorPart(
        name=entry["name"],
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        indices=indices,
        values=_array(arrays, entry["values"], count, np.dtype(bits)),
    )


def _array(arrays: np.ndarray, offset: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    end = offset + count * dtype.itemsize
    if end > len(arrays):
        raise ValueError(f"an update has {len(arrays)} bytes of arrays and says {end}")
    return arrays[offset:end].view(dtype)
