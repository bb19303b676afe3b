"""Engines of your own: made by the factory that a recipe names, and whole before they train."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from astraflow.config.recipe import OwnEngine, Trainer
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.engine import TrainEngine
from astraflow.workflows.registry import see_working_directory

_COUNT: Final = "step_count"
_METHODS: Final = ("train_step", "named_parameters", "save", "wait_for_save", "restore")


def make_engine(own: OwnEngine, settings: Trainer, *, model_dir: Path) -> TrainEngine:
    """Call the factory of a recipe.

    It is called with the recipe's options, and with `settings` and `model_dir` where it has
    parameters of these names.

    Args:
        own: Names the factory.
        settings: Of the trainer.
        model_dir: The first weights, architecture and tokenizer of the policy.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is no such factory, INVALID_FIELD when it raises.
    """
    see_working_directory()
    what = f"the engine {own.name}"
    factory = _guarded(lambda: load(own.name, what=what), f"{what}, when it was imported,")
    offered = {"settings": settings, "model_dir": model_dir}
    arguments = {**_asked_for(factory, offered), **own.options}
    return _guarded(lambda: factory(**arguments), what)


def prepare(engine: TrainEngine) -> None:
    """Let an engine load its first weights, and look whether it has all that the loop calls.

    Raises:
        AstraflowError: CAPABILITY_MISSING naming what it lacks; what the engine raises.
    """
    _require(engine, lacking=[] if callable(getattr(engine, "prepare", None)) else ["prepare()"])
    engine.prepare()
    lacking = [f"{name}()" for name in _METHODS if not callable(getattr(engine, name, None))]
    _require(engine, lacking=lacking if hasattr(engine, _COUNT) else [_COUNT, *lacking])


def _require(engine: object, *, lacking: list[str]) -> None:
    if lacking:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"{type(engine).__name__} is no train engine: it lacks {', '.join(lacking)}; "
            "astraflow/trainers/engine.py says what each does",
        )


def _asked_for(factory: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the offered things a factory has parameters for."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    return {name: thing for name, thing in offered.items() if name in known}


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Return what code of a user returns; say where it raised what it did."""
    try:
        return call()
    except AstraflowError:
        raise
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{what} raised {type(error).__name__}: {error}, in {place.filename}, line "
            f"{place.lineno}",
        ) from error
