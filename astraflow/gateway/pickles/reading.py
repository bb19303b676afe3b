"""Reading a pickled body: the table of names, and a look at what came out."""

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.gateway.pickles.arrays import (
    ArrayInMaking,
    make_array,
    make_array_from_buffer,
    make_dtype,
    make_scalar,
    no_call,
)
from astraflow.gateway.pickles.budget import Budget, PickleLimits, refused
from astraflow.gateway.pickles.cursor import Cursor
from astraflow.gateway.pickles.instructions import run
from astraflow.gateway.pickles.machine import Machine, Symbol
from astraflow.gateway.pickles.tensors import make_storage, make_tensor

_LEAVES: Final = (type(None), bool, int, float, str, bytes, np.ndarray)


def _encode(budget: Budget, arguments: tuple[Any, ...]) -> bytes:
    """_codecs.encode(text, "latin1"): how bytes are written before protocol 3."""
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
        raise refused("bytes of it are written in another way than pickle's")
    budget.spend(len(arguments[0]))
    try:
        return arguments[0].encode("latin-1")
    except UnicodeEncodeError:
        raise refused("bytes of it are no bytes") from None


def _bytes(_: Budget, arguments: tuple[Any, ...]) -> bytes:
    """bytes() or bytearray(bytes)."""
    match arguments:
        case ():
            return b""
        case (bytes() as raw,):
            return raw
        case _:
            raise refused("bytes of it are made of other than bytes")


def _ordered_dict(_: Budget, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise refused("an ordered dict of it is made of arguments")
    return {}


_TABLE: Final[Mapping[tuple[str, str], Symbol]] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _bytes,
    ("__builtin__", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("__builtin__", "bytearray"): _bytes,
    ("collections", "OrderedDict"): _ordered_dict,
    ("numpy", "dtype"): make_dtype,
    ("numpy", "ndarray"): no_call,
    ("torch._utils", "_rebuild_tensor_v2"): make_tensor,
    ("torch.storage", "_load_from_bytes"): make_storage,
    **{
        (f"numpy.{core}.{module}", name): call
        for core in ("core", "_core")
        for module, name, call in (
            ("multiarray", "_reconstruct", make_array),
            ("multiarray", "scalar", make_scalar),
            ("numeric", "_frombuffer", make_array_from_buffer),
        )
    },
}


def read_pickle(body: bytes | bytearray | memoryview, limits: PickleLimits | None = None) -> Any:
    """Return the plain data of a pickled body.

    Dicts, lists, tuples, texts, bytes, numbers, booleans and None come as they are; tensors of
    torch and arrays of numpy as numpy arrays, which may not be written to and may be views of the
    body. No code is run, whatever the body says.

    Args:
        body: Of protocol 0 to 5, all of it.
        limits: None: the usual ones.

    Raises:
        AstraflowError: INVALID_FIELD for anything else, and for what would cost too much.
    """
    budget = Budget(limits or PickleLimits(), len(body))
    cursor = Cursor(memoryview(body))
    try:
        value = run(Machine(cursor, budget, _TABLE))
        if cursor.left:
            raise refused(f"{cursor.left} bytes follow its end")
        return _plain(value, budget, 0)
    except AstraflowError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise refused(f"it is not well formed ({type(error).__name__})") from None


def _plain(value: Any, budget: Budget, depth: int) -> Any:
    """Copy containers, so that none holds itself, with finished arrays and nothing but data."""
    budget.visit()
    kind = cast("type[Any]", type(value))
    if kind in _LEAVES:
        return value
    if depth > budget.limits.depth:
        raise refused("it has too many values within values")
    if kind is dict:
        return {key: _plain(each, budget, depth + 1) for key, each in value.items()}
    if kind is list or kind is tuple:
        values: list[Any] = [_plain(each, budget, depth + 1) for each in value]
        return values if kind is list else tuple(values)
    if kind is ArrayInMaking and value.array is not None:
        return value.array
    raise refused(f"a value of it is a {kind.__name__}, which is no plain data")
