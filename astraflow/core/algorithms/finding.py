"""Makes data algorithms from what a recipe says of them, and calls them.

Code of others that fails ends the run, and breaks nothing.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from traceback import StackSummary, walk_tb
from types import UnionType
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from astraflow.core.algorithms.points import (
    BatchGuard,
    PlugIn,
    PromptSelector,
    ReplayOrder,
    RolloutFilter,
)
from astraflow.core.code import find_target, installed, load
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.settings import PlugInSpec

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[2])
_MAX_LINES = 8


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


Algorithm = TypeVar("Algorithm", bound=PlugIn)


class Point(StrEnum):
    """Where it plugs in; entry points are in the group `astraflow.<point>`."""

    SELECTOR = "prompt_selectors"
    FILTER = "rollout_filters"
    ORDER = "replay_orders"
    GUARD = "batch_guards"


_BUILT_IN: Mapping[Point, Mapping[str, str]] = {
    Point.SELECTOR: {
        "uniform": "astraflow.core.algorithms.selection:UniformSelector",
        "filter_solved": "astraflow.core.algorithms.selection:FilterSolved",
        "curriculum": "astraflow.core.algorithms.selection:Curriculum",
        "greso": "astraflow.core.algorithms.selection:Greso",
    },
    Point.FILTER: {
        "zero_advantage": "astraflow.core.algorithms.filters:ZeroAdvantage",
        "reward_range": "astraflow.core.algorithms.filters:RewardRange",
        "length": "astraflow.core.algorithms.filters:Length",
        "truncated": "astraflow.core.algorithms.filters:Truncated",
        "route": "astraflow.core.algorithms.filters:Route",
    },
    Point.ORDER: {
        "latest": "astraflow.core.algorithms.serving:Latest",
        "uniform": "astraflow.core.algorithms.serving:UniformReplay",
        "prioritised": "astraflow.core.algorithms.serving:Prioritised",
    },
    Point.GUARD: {
        "distinct_prompts": "astraflow.core.algorithms.serving:DistinctPrompts",
        "useful_share": "astraflow.core.algorithms.serving:UsefulShare",
    },
}

BASES: Mapping[Point, type[PlugIn]] = {
    Point.SELECTOR: PromptSelector,
    Point.FILTER: RolloutFilter,
    Point.ORDER: ReplayOrder,
    Point.GUARD: BatchGuard,
}


def make(base: type[Algorithm], spec: PlugInSpec) -> Algorithm:
    """Make an algorithm of one of the `BASES`, at the start of its state.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here, or it is no algorithm
            for this point; INVALID_FIELD for options that it does not take.
    """
    point = next(each for each, its_base in BASES.items() if its_base is base)
    found = find(point, spec.name)
    where = f"{point} {spec.name}"
    if not (isinstance(found, type) and issubclass(found, base) and is_dataclass(found)):
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"{where} is no algorithm for this point: make it a dataclass with the base "
            f"{base.__name__} of astraflow.core.algorithms.points",
        )
    return with_options(cast("type[Algorithm]", found), spec.options, where=where)


def must_not_read_tokens(point: Point, name: str) -> None:
    """Refuse an algorithm that needs what a run with a payload store does not have.

    Raises:
        AstraflowError: INVALID_FIELD; CODE_UNKNOWN.
    """
    if getattr(find(point, name), "reads_tokens", False):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{point} {name} reads tokens, which rollouts.payloads keeps from the hub; take one of "
            "them out of the recipe, or have the workflow tell in metrics or reward_parts what the "
            "algorithm needs",
        )


def names(point: Point) -> tuple[str, ...]:
    """Return what is built in and what installed packages add."""
    return tuple(sorted({*_BUILT_IN[point], *installed(f"astraflow.{point}")}))


def find(point: Point, name: str) -> Any:
    """Return what a name stands for; imports its module.

    Raises:
        AstraflowError: CODE_UNKNOWN.
    """
    target = find_target(point, name, _BUILT_IN[point], names=names(point))
    return load(target, what=f"{point}: {name}")


P = ParamSpec("P")


class Faults:
    """Calls algorithms, and remembers the first one that failed.

    Attributes:
        first: Why the run cannot go on; None: all went well.
    """

    def __init__(self) -> None:
        self.first: Failure | None = None

    def call(
        self, where: str, default: T, function: Callable[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Return what an algorithm says, or a default when it raises."""
        try:
            return function(*args, **more)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever others may raise
            self.note(where, f"{type(error).__name__}: {error}", traceback=_lines_of_others(error))
            return default

    def metrics(self, prefix: str, algorithm: PlugIn) -> dict[str, float]:
        def read() -> dict[str, float]:
            found = algorithm.metrics().items()
            return {f"{prefix}/{name}": float(value) for name, value in found}

        return self.call(prefix, dict[str, float](), read)

    def note(self, where: str, what: str, *, traceback: str = "") -> None:
        self.first = self.first or Failure(
            reason=Reason.INTERNAL,
            message=f"{where} failed ({what}); mend its code, or take it out of the recipe",
            traceback=traceback,
        )


def _lines_of_others(error: BaseException) -> str:
    """Return where an error came through code that is not of this package, without its source."""
    # Sources are files, which the state machine does not read.
    passed = StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)
    others = [each for each in passed if not each.filename.startswith(_PACKAGE)][:_MAX_LINES]
    told = [f'  File "{each.filename}", line {each.lineno}, in {each.name}' for each in others]
    return "\n".join(["Traceback (most recent call last):", *told]) if told else ""
