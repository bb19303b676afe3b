"""Makes data algorithms from what a recipe says of them."""

import difflib
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from astraflow.core.algorithms.options import with_options
from astraflow.core.algorithms.plug_in import PlugIn, PlugInSpec
from astraflow.core.algorithms.points import (
    BatchGuard,
    PromptSelector,
    ReplayOrder,
    RolloutFilter,
)
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason

T = TypeVar("T", bound=PlugIn)


class Point(StrEnum):
    """Where it plugs in; entry points are in the group `astraflow.<point>`."""

    SELECTOR = "prompt_selectors"
    FILTER = "rollout_filters"
    ORDER = "replay_orders"
    GUARD = "batch_guards"


_BUILT_IN: Mapping[Point, Mapping[str, str]] = {
    Point.SELECTOR: {
        "uniform": "astraflow.core.algorithms.selection.uniform:UniformSelector",
        "filter_solved": "astraflow.core.algorithms.selection.filter_solved:FilterSolved",
        "curriculum": "astraflow.core.algorithms.selection.curriculum:Curriculum",
        "greso": "astraflow.core.algorithms.selection.greso:Greso",
    },
    Point.FILTER: {
        "zero_advantage": "astraflow.core.algorithms.filters.zero_advantage:ZeroAdvantage",
        "reward_range": "astraflow.core.algorithms.filters.reward_range:RewardRange",
        "length": "astraflow.core.algorithms.filters.length:Length",
        "truncated": "astraflow.core.algorithms.filters.truncated:Truncated",
        "route": "astraflow.core.algorithms.filters.route:Route",
    },
    Point.ORDER: {
        "latest": "astraflow.core.algorithms.serving.latest:Latest",
        "uniform": "astraflow.core.algorithms.serving.uniform:UniformReplay",
        "prioritised": "astraflow.core.algorithms.serving.prioritised:Prioritised",
    },
    Point.GUARD: {
        "distinct_prompts": "astraflow.core.algorithms.serving.distinct_prompts:DistinctPrompts",
        "useful_share": "astraflow.core.algorithms.serving.useful_share:UsefulShare",
    },
}
_BASES: Mapping[Point, type[PlugIn]] = {
    Point.SELECTOR: PromptSelector,
    Point.FILTER: RolloutFilter,
    Point.ORDER: ReplayOrder,
    Point.GUARD: BatchGuard,
}


def selector(spec: PlugInSpec) -> PromptSelector:
    """Make a prompt selector; raises as `make` does."""
    return make(Point.SELECTOR, spec, PromptSelector)


def rollout_filter(spec: PlugInSpec) -> RolloutFilter:
    """Make a rollout filter; raises as `make` does."""
    return make(Point.FILTER, spec, RolloutFilter)


def replay_order(spec: PlugInSpec) -> ReplayOrder:
    """Make a replay order; raises as `make` does."""
    return make(Point.ORDER, spec, ReplayOrder)


def batch_guard(spec: PlugInSpec) -> BatchGuard:
    """Make a batch guard; raises as `make` does."""
    return make(Point.GUARD, spec, BatchGuard)


def make(point: Point, spec: PlugInSpec, base: type[T]) -> T:
    """Make an algorithm, at the start of its state.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here, or it is no algorithm
            for this point; INVALID_FIELD for options that it does not take.
    """
    found = find(point, spec.name)
    where = f"{point} {spec.name}"
    if not (isinstance(found, type) and issubclass(found, base) and is_dataclass(found)):
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"{where} is no algorithm for this point: make it a dataclass with the base "
            f"{base.__name__} of astraflow.core.algorithms.points",
        )
    return with_options(cast("type[T]", found), spec.options, where=where)


def names(point: Point) -> tuple[str, ...]:
    """Return what is built in and what installed packages add."""
    return tuple(sorted({*_BUILT_IN[point], *_entry_points(point)}))


def find(point: Point, name: str) -> Any:
    """Return what a name stands for; imports its module.

    Raises:
        AstraflowError: CODE_UNKNOWN.
    """
    return load(_target(point, name), what=f"{point}: {name}")


def _target(point: Point, name: str) -> str:
    if ":" in name:
        return name
    target = _BUILT_IN[point].get(name) or _entry_points(point).get(name)
    if target is None:
        near = difflib.get_close_matches(name, names(point), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names(point))}."
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"{point}: '{name}' is not known here; {hint} Code of your own is named module:Class",
        )
    return target


@cache
def _entry_points(point: Point) -> Mapping[str, str]:
    return {found.name: found.value for found in entry_points(group=f"astraflow.{point}")}
