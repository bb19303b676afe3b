"""TrainEngine: what steps a model, of whatever it is made."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from astraflow.client.trainer import TrainerBatch


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
        """Yield what is published: names and arrays as `weights.arrays.reader_of` takes them.

        Names and shapes are those of the Hugging Face checkpoint and never change. Each tensor
        comes once. They are read before the next call of any kind, and never after; those of an
        engine that `WarnsOfChange` until it does, on another thread.
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
