"""Arrays as numpy pickles them; sizes are compared with what came before anything is made."""

from math import prod
from typing import Any, Final

import numpy as np

from astraflow.gateway.pickles.budget import Budget, refused, require_tuple

_CODES: Final = frozenset(
    f"{k}{n}" for k, ns in {"iu": "1248", "f": "248"}.items() for k in k for n in ns
) | {"b1"}
_DIMENSIONS: Final = 32


class DtypeInMaking:
    """An element type; its state says little-endian, or it is refused."""

    __slots__ = ("numpy",)

    def __init__(self, code: Any) -> None:
        if code not in _CODES:
            raise refused("an array of it is neither of numbers nor of booleans")
        self.numpy = np.dtype(f"<{code}")

    def build(self, _: Budget, state: Any) -> None:
        """Take (version, byte order, subarray, names, fields, size, alignment, flags)."""
        why = "an array of it is big-endian or has fields"
        parts = require_tuple(state, why)
        if len(parts) < 8 or parts[1] not in ("<", "|", "=") or parts[2:5] != (None, None, None):
            raise refused(why)


class ArrayInMaking:
    """An array whose shape and bytes are in its state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def build(self, _: Budget, state: Any) -> None:
        """Take (version, shape, dtype, is_fortran, bytes)."""
        why = "the state of an array is none"
        parts = require_tuple(state, why)
        if len(parts) != 5 or type(parts[3]) is not bool:
            raise refused(why)
        self.array = array_of(parts[4], parts[2], parts[1], "F" if parts[3] else "C")


def array_of(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Return an array over its bytes, without a copy.

    Raises:
        AstraflowError: INVALID_FIELD when the bytes are not those of the shape.
    """
    if type(raw) is not bytes or not isinstance(dtype, DtypeInMaking) or order not in ("C", "F"):
        raise refused("an array of it is described in another way than numpy's")
    lengths = require_shape(shape)
    if prod(lengths) * dtype.numpy.itemsize != len(raw):
        raise refused(f"an array of shape {list(lengths)} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype.numpy).reshape(lengths, order=order)


def require_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape that is a tuple of lengths.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    why = "the shape of an array is no tuple of lengths"
    lengths = require_tuple(shape, why)
    if len(lengths) > _DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 48 for n in lengths):
        raise refused(why)
    return lengths


def make_dtype(_: Budget, arguments: tuple[Any, ...]) -> DtypeInMaking:
    """numpy.dtype(code, align, copy)."""
    if not arguments or type(arguments[0]) is not str:
        raise refused("an element type of it has no code")
    return DtypeInMaking(arguments[0])


def make_array(_: Budget, arguments: tuple[Any, ...]) -> ArrayInMaking:
    """_reconstruct(ndarray, (0,), b"b"): what these say is overwritten by the state."""
    if len(arguments) != 3:
        raise refused("an array of it is made of other than three arguments")
    return ArrayInMaking()


def make_array_from_buffer(_: Budget, arguments: tuple[Any, ...]) -> np.ndarray:
    """_frombuffer(bytes, dtype, shape, order)."""
    if len(arguments) != 4:
        raise refused("an array of it is made of other than four arguments")
    return array_of(*arguments)


def make_scalar(_: Budget, arguments: tuple[Any, ...]) -> Any:
    """scalar(dtype, bytes), as a Python number."""
    if len(arguments) != 2:
        raise refused("a number of it is made of other than two arguments")
    return array_of(arguments[1], arguments[0], (), "C").item()


def no_call(_: Budget, __: tuple[Any, ...]) -> Any:
    """What is only named, never called: the class in `make_array`."""
    raise refused("it calls a class")
