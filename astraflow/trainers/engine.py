"""TrainEngine: what steps a model, of whatever it is made, and how a recipe's own one is made."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from astraflow.client.trainer import TrainerBatch
from astraflow.config.recipe import OwnEngine, TrainerConfig
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason


class TrainEngine(Protocol):
    """A model and its optimizer, as `TrainingLoop` drives them; `TorchEngine` is one.

    All calls but `wait_for_save` come from one thread. An engine knows nothing of runs, versions
    and acks: with these seven names any framework trains. `astraflow conformance engine` says
    whether it keeps them.
    """

    @property
    def step_count(self) -> int:
        """Optimizer steps behind the present weights."""
        ...

    def prepare(self) -> None:
        """Load the first weights; called once, before anything else."""
        ...

    def train_step(self, batch: TrainerBatch) -> Mapping[str, float]:
        """Make one optimizer step, or none of it.

        A batch that can move nothing (no rows here, all advantages 0) counts as a step too.

        Args:
            batch: This rank's share; `TrainRows.from_parts(batch.parts)` joins it.

        Returns:
            Numbers for the log, such as train/loss; of the weights before the step.

        Raises:
            AstraflowError: INVALID_FIELD for a batch that cannot be trained on, INTERNAL for a
                gradient that is not finite. Weights, optimizer and step count are what they were.
        """
        ...

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Yield what is published: names and arrays.

        These are what `weights.publish.tensors.reader_of` takes, names and shapes those of the
        Hugging Face checkpoint, which never change. Each tensor comes once. They are read before
        the next call of any kind, and never after; those of an engine that `WarnsOfChange` until it
        does, on another thread.
        """
        ...

    def save(self, directory: Path) -> None:
        """Begin to write all that `restore` needs into an empty directory.

        What a resume alone needs goes by the name of optimizer.pt or optimizer/: older checkpoints
        lose it. The next step may come before the writing ends.
        """
        ...

    def wait_for_save(self) -> None:
        """Wait until what was saved last is whole, on another thread, while steps go on.

        Raises:
            OSError: It could not be written.
        """
        ...

    def restore(self, directory: Path) -> None:
        """Be as when `save` was called: weights, optimizer and step count, to the bit.

        Raises:
            AstraflowError: INVALID_FIELD when the directory does not hold that.
        """
        ...


@runtime_checkable
class FollowsVersions(Protocol):
    """An engine that wants to know what its weights are published as."""

    def at_version(self, version: int) -> None:
        """The present weights are this version; called before the step that changes them."""
        ...


@runtime_checkable
class WarnsOfChange(Protocol):
    """An engine that computes while its weights are still being read for their version."""

    def before_change(self, call: Callable[[], None]) -> None:
        """Call back in every `train_step` just before the weights change, on its thread."""
        ...


@runtime_checkable
class ReplaysExperts(Protocol):
    """An engine that can send tokens through the experts that the sampler took."""

    @property
    def replays_experts(self) -> bool:
        """Whether it does, with this model and these settings; asked after `prepare`."""
        ...


@runtime_checkable
class TellsLikelihoods(Protocol):
    """An engine that can say how likely it finds what was sampled."""

    def likelihoods(self, batch: TrainerBatch) -> np.ndarray:
        """Return f32[K], log-probabilities of the tokens that the loss applies to, in order."""
        ...


_COUNT: Final = "step_count"

_METHODS: Final = ("train_step", "named_parameters", "save", "wait_for_save", "restore")


def make_engine(own: OwnEngine, settings: TrainerConfig, *, model_dir: Path) -> TrainEngine:
    """Call the factory of a recipe.

    It is called with the recipe's options, and with `settings` and `model_dir` where it has
    parameters of these names.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is no such factory, INVALID_FIELD when it raises.
    """
    what = f"the engine {own.name}"
    factory = guarded(lambda: load(own.name, what=what), f"{what}, when it was imported,")
    offered = {"settings": settings, "model_dir": model_dir}
    arguments = {**_accepted(factory, offered), **own.options}
    return guarded(lambda: factory(**arguments), what)


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


def _accepted(factory: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the offered things a factory has parameters for."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    return {name: thing for name, thing in offered.items() if name in known}


def guarded(call: Callable[[], Any], what: str) -> Any:
    """Return what code of a user returns; say where it raised what it did.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
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
