"""The bench on which an engine is looked at, and how its weights are compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from astraflow.client.trainer import TrainerBatch
from astraflow.conformance.checks import Broken
from astraflow.conformance.engine_batches import made_batch
from astraflow.core.dtype import Dtype
from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.origin import published_layout
from astraflow.weights.patches.shard_layout import WHOLE
from astraflow.weights.publish.tensors import reader_of

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where an engine is looked at.

    Attributes:
        make: Returns a new engine, with the same first weights every time.
        vocabulary_size: Tokens that it knows: 0 to below that.
        folder: Empty; for its checkpoints.
    """

    make: Callable[[], TrainEngine]
    vocabulary_size: int
    folder: Path

    def engine(self, *seeds: int) -> TrainEngine:
        """Return an engine that is prepared and has made a step for each seed."""
        engine = self.make()
        engine.prepare()
        for seed in seeds:
            engine.train_step(self.batch(seed))
        return engine

    def batch(self, seed: int, *, advantage: float | None = None) -> TrainerBatch:
        """Return a batch; see `made_batch`."""
        return made_batch(self.vocabulary_size, seed=seed, advantage=advantage)

    def new_folder(self, name: str) -> Path:
        """Return an empty folder for a checkpoint."""
        path = self.folder / name
        path.mkdir(parents=True)
        return path


def weights_of(engine: TrainEngine) -> Weights:
    """Return copies of what an engine publishes, its values in full."""
    pairs = list(engine.named_parameters())
    layout = published_layout(pairs, Dtype.F32)
    if not pairs or len(layout.by_name) != len(pairs):
        raise Broken(f"names of parameters: {[name for name, _ in pairs][:5]}, none or one twice")
    arrays = dict(pairs)
    return {
        spec.name: reader_of(arrays[spec.name], spec, WHOLE)(0, spec.element_count)
        .copy()
        .reshape(spec.shape)
        for spec in layout.tensors
    }


def require_count(engine: TrainEngine, wanted: int) -> None:
    """Find fault with a step count."""
    if engine.step_count != wanted:
        raise Broken(f"step_count is {engine.step_count}, not {wanted}")


def require_same(left: Weights, right: Weights, when: str) -> None:
    """Find fault with weights that are not the same bits."""
    name = difference(left, right)
    if name is not None:
        raise Broken(f"the weights {when} differ, first in {name}")


def difference(left: Weights, right: Weights) -> str | None:
    """Return the first name whose bits differ."""
    if left.keys() != right.keys():
        return min(left.keys() ^ right.keys())
    return next((name for name in left if not np.array_equal(left[name], right[name])), None)


def distance(left: Weights, right: Weights) -> float:
    """Return the Euclidean distance of the weights that are f32."""
    pairs = [
        (left[name].view(np.float32), right[name].view(np.float32))
        for name in left
        if left[name].dtype == np.uint32
    ]
    return float(np.sqrt(sum(np.square(a - b, dtype=np.float64).sum() for a, b in pairs)))
