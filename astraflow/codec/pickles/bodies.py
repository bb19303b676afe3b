"""Pickled bodies: what stands for the names in one that is read, and bodies written by hand.

Sizes are compared with the bytes that are there before anything is made. What is large is written
without a copy, and torch need not be there: arrays are written as tensors of torch, which is what
peers expect; `pickle.loads` reads the result where torch is installed.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from struct import pack
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided

from astraflow.codec.pickles.machine import Budget, Call, PickleFile, Symbol, refused, run
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype

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

_STEPS: Final = 4_000_000
_DEPTH: Final = 64
_DIMENSIONS: Final = 32
_CODES: Final = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_LEAVES: Final = (type(None), bool, int, float, str, bytes, np.ndarray)


def read_pickle(body: bytes | bytearray | memoryview, *, step_count: int = _STEPS) -> Any:
    """Return the plain data of a pickled body.

    Dicts, lists, tuples, texts, bytes, numbers, booleans and None come as they are; tensors of
    torch and arrays of numpy as numpy arrays, which may not be written to. No code is run, whatever
    the body says.

    Args:
        body: Of protocol 0 to 5, all of it.
        step_count: Instructions that it may have.

    Raises:
        AstraflowError: INVALID_FIELD for anything else, and for what would cost too much.
    """
    budget = Budget(step_count, len(body))
    file = PickleFile(body, budget)
    try:
        value = run(file, _NAMES)
        if file.tell() != len(body):
            raise refused(f"{len(body) - file.tell()} bytes follow its end")
        return _plain(value, budget, 0)
    except (ValueError, TypeError, OverflowError, LookupError, RecursionError, Warning) as error:
        # What the error says may be of the body.
        raise refused(f"it is not well formed ({type(error).__name__})") from None


def _plain(value: Any, budget: Budget, depth: int) -> Any:
    """Copy containers, so that none holds itself, with finished arrays and nothing but data."""
    budget.visit()
    kind = cast("type[Any]", type(value))
    if kind in _LEAVES:
        return value
    if depth > _DEPTH:
        raise refused("it has too many values within values")
    if kind is dict:
        return {key: _plain(each, budget, depth + 1) for key, each in value.items()}
    if kind is list or kind is tuple:
        values: list[Any] = [_plain(each, budget, depth + 1) for each in value]
        return values if kind is list else tuple(values)
    if kind is _Array and value.array is not None:
        return value.array
    raise refused(f"a value of it is a {kind.__name__}, which is no plain data")


# What stands for names: each takes the arguments that the name would be called with.
def _encode(budget: Budget, text: Any, codec: Any) -> bytes:
    """_codecs.encode(text, "latin1"): how bytes are written before protocol 3."""
    if type(text) is not str or codec != "latin1":
        raise refused("bytes of it are written in another way than pickle's")
    budget.spend(len(text))
    return text.encode("latin-1")


def _bytes(_: Budget, raw: Any = b"") -> bytes:
    """bytes() or bytearray(bytes)."""
    if type(raw) is not bytes:
        raise refused("bytes of it are made of other than bytes")
    return raw


def _ordered_dict(_: Budget) -> dict[Any, Any]:
    return {}


def _no_call(*_: Any) -> Any:
    """What is only named: the class of arrays, and those of storages."""
    raise refused("it calls a class")


class _ElementType:
    """numpy.dtype(code, align, copy); its state says little-endian, or it is refused."""

    def __init__(self, _: Budget, code: Any, *__: Any) -> None:
        if code not in _CODES:
            raise refused("an array of it is neither of numbers nor of booleans")
        self.numpy = np.dtype(f"<{code}")

    def build(self, _: Any, order: Any, *described: Any) -> None:
        """Take (version, byte order, subarray, names, fields, size, alignment, flags)."""
        if order not in ("<", "|", "=") or described[:3] != (None, None, None):
            raise refused("an array of it is big-endian or has fields")


class _Array:
    """_reconstruct(ndarray, (0,), b"b"): what these say is overwritten by the state."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray | None = None

    def build(self, _: Any, shape: Any, dtype: Any, is_fortran: Any, raw: Any) -> None:
        """Take (version, shape, dtype, is_fortran, bytes)."""
        self.array = _array_of(_, raw, dtype, shape, "F" if is_fortran else "C")


def _array_of(_: Any, raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """_frombuffer(bytes, dtype, shape, order), without a copy."""
    if type(raw) is not bytes or not isinstance(dtype, _ElementType):
        raise refused("an array of it is described in another way than numpy's")
    lengths = _shape(shape)
    if prod(lengths) * dtype.numpy.itemsize != len(raw):
        raise refused(f"an array of shape {list(lengths)} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype.numpy).reshape(lengths, order=order)


def _scalar(budget: Budget, dtype: Any, raw: Any) -> Any:
    """scalar(dtype, bytes), as a Python number."""
    return _array_of(budget, raw, dtype, (), "C").item()


def _shape(lengths: Any) -> tuple[int, ...]:
    if type(lengths) is not tuple or len(cast("tuple[Any, ...]", lengths)) > _DIMENSIONS:
        raise refused("the shape of an array is none")
    shape = cast("tuple[Any, ...]", lengths)
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise refused("a length of an array is none")
    return shape


class _Storage:
    """_load_from_bytes(bytes): the elements of tensors, one after the other, in a file of torch.

    It is the one before torch's zip files: a magic number, a protocol number, a dict about the
    machine, a pickle with one persistent id that describes the storage, the list of storages, then
    the number of elements (u64) and their bytes.
    """

    def __init__(self, budget: Budget, raw: Any) -> None:
        if type(raw) is not bytes:
            raise refused("a storage of it is made of other than bytes")
        described: list[Any] = []
        file = PickleFile(raw, budget)
        parts = [run(file, _STORAGE_NAMES, described.append) for _ in range(5)]
        match parts, described:
            case (
                [int() as magic, int() as protocol, {"little_endian": True}, _, [str() as named]],
                [("storage", Symbol() as kind, str() as key, _, int() as count, None)],
            ) if (magic, protocol, named) == (MAGIC, PROTOCOL, key):
                pass
            case _:
                raise refused("a tensor of it is no file of torch's that is read here")
        dtype = STORAGES[kind.name.removeprefix("torch ")]
        told, at = int.from_bytes(file.read(8), "little"), file.tell()
        if told != count or len(raw) - at != count * dtype.itemsize:
            raise refused(f"a storage of {count} elements has {len(raw) - at} bytes")
        self.elements = np.frombuffer(raw, dtype.numpy, offset=at)
        if dtype is Dtype.BF16:
            budget.spend(4 * count)
            self.elements = (self.elements.astype(np.uint32) << 16).view(np.float32)


def _tensor(budget: Budget, storage: Any, first: Any, size: Any, stride: Any, *_: Any) -> Any:
    """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks).

    The array is a view of the storage. bf16, which numpy lacks, becomes f32.
    """
    shape, strides = _shape(size), _shape(stride)
    if not isinstance(storage, _Storage) or type(first) is not int or first < 0:
        raise refused("a tensor of it is made of other than torch's arguments")
    elements, count = storage.elements, prod(shape)
    if not count:
        return np.empty(shape, elements.dtype)
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if last >= len(elements):
        raise refused(f"a tensor reaches element {last} of {len(elements)}")
    if count > len(elements):
        budget.spend(count * elements.itemsize)
    steps = [step * elements.itemsize for step in strides]
    return as_strided(elements[first:], shape, steps, writeable=False)


_STORAGE_NAMES: Final[Mapping[str, Call]] = {f"torch {name}": _no_call for name in STORAGES}

_NAMES: Final[Mapping[str, Call]] = {
    "_codecs encode": _encode,
    "builtins bytes": _bytes,
    "__builtin__ bytes": _bytes,
    "builtins bytearray": _bytes,
    "__builtin__ bytearray": _bytes,
    "collections OrderedDict": _ordered_dict,
    "numpy dtype": _ElementType,
    "numpy ndarray": _no_call,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch.storage _load_from_bytes": _Storage,
} | {
    f"numpy.{core}.{name}": call
    for core in ("core", "_core")
    for name, call in (
        ("multiarray _reconstruct", _Array),
        ("multiarray scalar", _scalar),
        ("numeric _frombuffer", _array_of),
    )
}

_NAME_OF_STORAGE: Final = {dtype: name for name, dtype in STORAGES.items()}
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
        yield _written_scalar(value)
    elif isinstance(value, np.ndarray):
        yield from _written_tensor(cast("np.ndarray", value))
    elif isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        yield from (b"}(", *_written_all(chain.from_iterable(items)), b"u")
    elif isinstance(value, tuple):
        yield from (b"(", *_written_all(cast("tuple[Any, ...]", value)), b"t")
    elif isinstance(value, Sequence):
        yield from (b"](", *_written_all(cast("Sequence[Any]", value)), b"e")
    else:
        raise AstraflowError(Reason.INTERNAL, f"a {type(value).__name__} is not written in bodies")


def _written_all(values: Iterable[Any]) -> Iterator[Chunk]:
    return chain.from_iterable(map(_written, values))


def _written_tensor(array: np.ndarray) -> Iterator[Chunk]:
    """Yield _rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())."""
    array = np.ascontiguousarray(array)
    strides = tuple(step // array.itemsize for step in array.strides)
    head = _storage_head(Dtype.of(array.dtype), array.size)
    yield b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n\x8e"
    yield pack("<Q", len(head) + array.nbytes) + head
    yield array.reshape(-1).view(np.uint8).data
    yield (
        b"\x85RK\x00" + _written_scalar(array.shape) + _written_scalar(strides) + _NO_HOOKS + b"tR"
    )


def _storage_head(dtype: Dtype, count: int) -> bytes:
    """Return what stands before the elements in the file of a storage."""
    describe = (
        b"\x80\x02(X\x07\x00\x00\x00storage"
        + f"ctorch\n{_NAME_OF_STORAGE[dtype]}\n".encode()
        + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + _written_scalar(count)
        + b"NtQ."
    )
    return _HEAD + describe + pickle.dumps(["0"], protocol=2) + pack("<Q", count)


def _written_scalar(value: Any) -> bytes:
    """Return the instructions of a value, without the frame of a pickle."""
    return pickle.dumps(value, protocol=3)[2:-1]
