"""Tensors as `pickle.dumps` of torch makes them: a storage in a file of its own, and a view.

The file is the one before torch's zip files: a magic number, a protocol number, a dict about the
machine, a pickle with one persistent id that describes the storage, the list of storages, then
the number of elements (u64) and their bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided

from astraflow.core.dtype import Dtype
from astraflow.gateway.pickles.arrays import require_shape
from astraflow.gateway.pickles.budget import Budget, refused, require_tuple
from astraflow.gateway.pickles.cursor import Cursor
from astraflow.gateway.pickles.instructions import run
from astraflow.gateway.pickles.machine import Machine, Symbol

MAGIC: Final = 0x1950A86A20F9469CFC6C
PROTOCOL: Final = 1001

STORAGES: Final[Mapping[str, Dtype]] = {
    "BoolStorage": Dtype.BOOL,
    "ByteStorage": Dtype.U8,
    "CharStorage": Dtype.I8,
    "ShortStorage": Dtype.I16,
    "IntStorage": Dtype.I32,
    "LongStorage": Dtype.I64,
    "HalfStorage": Dtype.F16,
    "BFloat16Storage": Dtype.BF16,
    "FloatStorage": Dtype.F32,
    "DoubleStorage": Dtype.F64,
}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The elements of tensors, one after the other."""

    elements: np.ndarray


@dataclass(frozen=True, slots=True)
class StorageType:
    """Stands for torch.IntStorage and the like; never called."""

    dtype: Dtype

    def __call__(self, _: Budget, __: tuple[Any, ...]) -> Any:
        """Refuse."""
        raise refused("it calls a storage type")


_TABLE: Final[Mapping[tuple[str, str], Symbol]] = {
    ("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()
}


def make_storage(budget: Budget, arguments: tuple[Any, ...]) -> Storage:
    """_load_from_bytes(bytes): read the file in them."""
    if len(arguments) != 1 or type(arguments[0]) is not bytes:
        raise refused("a storage of it is made of other than bytes")
    cursor = Cursor(memoryview(arguments[0]))
    head = [run(Machine(cursor, budget, {})) for _ in range(3)]
    if head[:2] != [MAGIC, PROTOCOL] or not _is_little_endian(head[2]):
        raise refused("a tensor of it is no file of torch's that is read here")
    described: list[tuple[str, Dtype, int]] = []

    def describe(name: Any) -> None:
        described.append(_description(name))

    run(Machine(cursor, budget, _TABLE, persistent=describe))
    keys = run(Machine(cursor, budget, {}))
    if len(described) != 1 or keys != [described[0][0]]:
        raise refused("a tensor of it has other than one storage")
    return Storage(_elements(cursor, budget, described[0][1], described[0][2]))


def _is_little_endian(about: Any) -> bool:
    known = cast("dict[Any, Any]", about) if type(about) is dict else {}
    return known.get("little_endian") is True


def _description(name: Any) -> tuple[str, Dtype, int]:
    """Read ("storage", type, key, location, number of elements, view)."""
    why = "a storage of it is described in another way than torch's"
    parts = require_tuple(name, why)
    if len(parts) != 6 or parts[0] != "storage" or parts[5] is not None:
        raise refused(why)
    kind, key, count = getattr(parts[1], "call", None), parts[2], parts[4]
    if not isinstance(kind, StorageType) or type(key) is not str or type(count) is not int:
        raise refused(why)
    return key, kind.dtype, count


def _elements(cursor: Cursor, budget: Budget, dtype: Dtype, count: int) -> np.ndarray:
    if cursor.uint(8) != count or cursor.left != count * dtype.itemsize:
        raise refused(f"a storage of {count} elements has {cursor.left} bytes")
    raw = np.frombuffer(cursor.take(cursor.left), dtype.numpy)
    if dtype is not Dtype.BF16:
        return raw
    budget.spend(4 * count)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def make_tensor(budget: Budget, arguments: tuple[Any, ...]) -> np.ndarray:
    """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks).

    The array is a view of the storage. bf16, which numpy lacks, becomes f32.
    """
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        raise refused("a tensor of it is made of other than torch's arguments")
    elements, first = arguments[0].elements, arguments[1]
    shape, strides = require_shape(arguments[2]), require_shape(arguments[3])
    if type(first) is not int or first < 0 or len(shape) != len(strides):
        raise refused("the offset or the strides of a tensor are none")
    count = prod(shape)
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if count and last >= len(elements):
        raise refused(f"a tensor reaches element {last} of {len(elements)}")
    if count > len(elements):
        budget.spend(count * elements.itemsize)
    if not count:
        return np.empty(shape, elements.dtype)
    steps = [step * elements.itemsize for step in strides]
    return as_strided(elements[first:], shape, steps, writeable=False)
