"""Frozen dataclasses that are made by the thousand per second."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    fill: Callable[..., None] | None
else:
    try:
        from astraflow.core._frozen import fill
    except ImportError:
        fill = None

Kind = TypeVar("Kind")

_NOT_GIVEN = object()


def fast_init(kind: type[Kind]) -> type[Kind]:
    """Have a frozen dataclass set all its fields in one call; its own way is a call for each.

    Its constructor takes the same keywords and has the same effect. Without the C extension it
    stays as it is.

    Args:
        kind: A dataclass that is frozen and takes keywords only.
    """
    if fill is None:
        return kind
    # Names that no field has.
    scope: dict[str, Any] = {"fill__": fill, "not_given__": _NOT_GIVEN}
    parameters, names, values = list[str](), list[str](), list[str]()
    for each in fields(kind):  # pyright: ignore[reportArgumentType] - a dataclass
        name, default, make = each.name, f"default__{each.name}", f"make__{each.name}"
        has_default, is_made = each.default is not MISSING, each.default_factory is not MISSING
        if not (each.init or has_default or is_made):
            continue
        scope |= {default: each.default, make: each.default_factory}
        value = name if each.init else default
        if is_made:
            value = f"{make}() if {name} is not_given__ else {name}" if each.init else f"{make}()"
        if each.init:
            given = "not_given__" if is_made else default
            parameters.append(f"{name}={given}" if has_default or is_made else name)
        names.append(name)
        values.append(value)
    scope["names__"] = tuple(names)
    checks = "\n    self.__post_init__()" if hasattr(kind, "__post_init__") else ""
    exec(  # noqa: S102 - of names of fields alone, as dataclasses does
        f"def __init__(self, *, {', '.join(parameters)}):\n"
        f"    fill__(self, names__, {', '.join(values)}){checks}\n",
        scope,
    )
    made = scope["__init__"]
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    made.__module__ = kind.__module__
    made.__annotations__ = kind.__init__.__annotations__
    kind.__init__ = made
    return kind
