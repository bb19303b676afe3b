"""Options of data algorithms: what a recipe says, checked against the fields of a dataclass."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from astraflow.core.errors import AstraflowError, Reason

T = TypeVar("T")


def with_options(kind: type[T], options: Mapping[str, Any], *, where: str) -> T:
    """Make an object of a dataclass.

    Lists become tuples and whole numbers become floats where a field asks for it.

    Args:
        kind: The dataclass; fields with `init=False` are no options.
        options: By field.
        where: For the error.

    Raises:
        AstraflowError: INVALID_FIELD for an option that it has not, that is missing, of another
            type, or that its `__post_init__` refuses with a ValueError.
    """
    known = {field.name: field for field in fields(cast("Any", kind)) if field.init}
    hints = get_type_hints(kind)
    try:
        _must_be_known(options, known)
        fitted = {name: _fitted(value, hints[name], name) for name, value in options.items()}
        return kind(**fitted)
    except ValueError as error:
        raise AstraflowError(Reason.INVALID_FIELD, f"{where}: {error}") from error


def _must_be_known(options: Mapping[str, Any], known: Mapping[str, Field[Any]]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"there is no option '{name}'; {hint}")
    for name, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and name not in options:
            raise ValueError(f"option '{name}' is missing")


def _fitted(value: Any, hint: Any, name: str) -> Any:
    """Return a value as its field has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or type(value) is hint:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fitted(each, inner[0], name) for each in cast("list[Any]", value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_fitted(k, inner[0], name): _fitted(v, inner[1], name) for k, v in items}
    if origin in (Union, UnionType):
        return _fitted_to_one(value, inner, name)
    wanted = ", ".join(map(str, inner)) if origin is Literal else getattr(hint, "__name__", hint)
    raise ValueError(f"option '{name}' is {value!r}, not {wanted}")


def _fitted_to_one(value: Any, hints: tuple[Any, ...], name: str) -> Any:
    """Return a value as the first kind of field that takes it."""
    if value is None and type(None) in hints:
        return None
    for hint in hints:
        try:
            return _fitted(value, hint, name)
        except ValueError:
            continue
    wanted = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
    raise ValueError(f"option '{name}' is {value!r}, not {wanted}")
