"""Writing a pickled body by hand: no copy of what is large, and torch need not be there.

Arrays are written as tensors of torch, which is what peers expect; `pickle.loads` reads the
result where torch is installed.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from struct import pack
from typing import Any, Final, TypeAlias, cast

import numpy as np

from astraflow.codec.pickles.reading import MAGIC, PROTOCOL, STORAGES
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason

_STORAGE_NAMES: Final = {dtype: name for name, dtype in STORAGES.items()}
_NO_HOOKS: Final = b"\x89ccollections\nOrderedDict\n)R"
_ABOUT: Final = {
    "protocol_version": PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_HEAD: Final = b"".join(pickle.dumps(each, protocol=2) for each in (MAGIC, PROTOCOL, _ABOUT))
_SCALARS: Final = (type(None), bool, int, float, str, bytes)

Chunk: TypeAlias = bytes | memoryview


def pickle_chunks(value: Any) -> list[Chunk]:
    """Return the parts of a pickled body, in order; arrays are not copied.

    Args:
        value: Mappings, sequences, texts, bytes, numbers, booleans, None and numpy arrays.

    Raises:
        AstraflowError: INTERNAL for anything else.
    """
    return [b"\x80\x04", *_written(value), b"."]


def _written(value: Any) -> Iterator[Chunk]:
    if type(value) in _SCALARS:
        yield _scalar(value)
    elif isinstance(value, np.ndarray):
        yield from _tensor(cast("np.ndarray", value))
    elif isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        yield from (b"}(", *_all(chain.from_iterable(items)), b"u")
    elif isinstance(value, tuple):
        yield from (b"(", *_all(cast("tuple[Any, ...]", value)), b"t")
    elif isinstance(value, Sequence):
        yield from (b"](", *_all(cast("Sequence[Any]", value)), b"e")
    else:
        raise AstraflowError(Reason.INTERNAL, f"a {type(value).__name__} is not written in bodies")


def _all(values: Iterable[Any]) -> Iterator[Chunk]:
    return chain.from_iterable(map(_written, values))


def _tensor(array: np.ndarray) -> Iterator[Chunk]:
    """Yield _rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())."""
    array = np.ascontiguousarray(array)
    strides = tuple(step // array.itemsize for step in array.strides)
    head = _storage_head(Dtype.of(array.dtype), array.size)
    yield b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n\x8e"
    yield pack("<Q", len(head) + array.nbytes) + head
    yield array.reshape(-1).view(np.uint8).data
    yield b"\x85RK\x00" + _scalar(array.shape) + _scalar(strides) + _NO_HOOKS + b"tR"


def _storage_head(dtype: Dtype, count: int) -> bytes:
    """Return what stands before the elements in the file of a storage."""
    describe = (
        b"\x80\x02(X\x07\x00\x00\x00storage"
        + f"ctorch\n{_STORAGE_NAMES[dtype]}\n".encode()
        + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + _scalar(count)
        + b"NtQ."
    )
    return _HEAD + describe + pickle.dumps(["0"], protocol=2) + pack("<Q", count)


def _scalar(value: Any) -> bytes:
    """Return the instructions of a value, without the frame of a pickle."""
    return pickle.dumps(value, protocol=3)[2:-1]
