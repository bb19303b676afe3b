"""The bench on which an engine is checked: its batches, and how its weights are compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from astraflow.client.trainer import TrainerBatch
from astraflow.conformance.checks import Broken
from astraflow.core.batches import BatchHeader, BatchPart
from astraflow.core.ids import BatchId, PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.core.tensors import Dtype
from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.origin import published_layout
from astraflow.weights.patches.layouts import WHOLE
from astraflow.weights.publish.tensors import reader_of

_POLICY: Final = PolicyId("solver")
_PROMPT_LENGTH: Final = 2


def made_batch(
    vocabulary_size: int, *, seed: int = 0, row_count: int = 6, advantage: float | None = None
) -> TrainerBatch:
    """Return a batch of one part, rows of 4 to 9 tokens; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 10, row_count)
    drawn = rng.normal(size=row_count)
    by_row = drawn if advantage is None else np.full(row_count, advantage)
    return batch_of((_part(rng, lengths, by_row, vocabulary_size),))


def batch_of(parts: Sequence[BatchPart]) -> TrainerBatch:
    """Return parts as the whole batch of one rank."""
    mask = np.concatenate([part.values("loss_mask") for part in parts])
    header = BatchHeader(
        batch_id=BatchId("made"),
        policy_id=_POLICY,
        version=0,
        part_count=len(parts),
        row_count=sum(part.row_count for part in parts),
        token_count=len(mask),
        loss_token_count=int(mask.sum()),
        groups=(),
        policy_ids=(_POLICY,),
    )
    return TrainerBatch(header=header, parts=tuple(parts), wait_s=0.0)


def altered(batch: TrainerBatch, **columns: np.ndarray) -> TrainerBatch:
    """Return a batch of one part with other values in some columns of tokens."""
    (part,) = batch.parts
    given = {name: Column(axis=ColumnAxis.TOKEN, values=each) for name, each in columns.items()}
    return replace(batch, parts=(replace(part, columns={**part.columns, **given}),))


def halved(batch: TrainerBatch) -> TrainerBatch:
    """Return the rows of a batch of one part in two."""
    (part,) = batch.parts
    middle = part.row_count // 2
    parts = _rows(part, 0, middle, index=0), _rows(part, middle, part.row_count, index=1)
    return replace(batch, header=replace(batch.header, part_count=2), parts=parts)


def _part(
    rng: np.random.Generator, lengths: np.ndarray, advantages: np.ndarray, vocabulary_size: int
) -> BatchPart:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(lengths.sum())
    mask = np.arange(count) - np.repeat(offsets[:-1], lengths) >= _PROMPT_LENGTH
    likely = -np.log(vocabulary_size) * (1 + 0.1 * rng.random(count))
    names = [f"made-{index}" for index in range(len(lengths))]
    tokens: dict[str, np.ndarray] = {
        "tokens": rng.integers(0, vocabulary_size, count).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, likely, 0).astype(np.float32),
        "advantages": np.where(mask, np.repeat(advantages, lengths), 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int64),
    }
    rows = {"rewards": advantages.astype(np.float32)}
    return BatchPart(
        batch_id=BatchId("made"),
        index=0,
        row_offsets=offsets,
        trajectory_ids=tuple(map(TrajectoryId, names)),
        rollout_ids=tuple(map(RolloutId, names)),
        columns={
            **{name: Column(axis=ColumnAxis.TOKEN, values=each) for name, each in tokens.items()},
            **{name: Column(axis=ColumnAxis.ROW, values=each) for name, each in rows.items()},
        },
    )


def _rows(part: BatchPart, start: int, stop: int, *, index: int) -> BatchPart:
    first, last = part.row_offsets[start], part.row_offsets[stop]
    spans = {ColumnAxis.TOKEN: slice(first, last), ColumnAxis.ROW: slice(start, stop)}
    return BatchPart(
        batch_id=part.batch_id,
        index=index,
        row_offsets=part.row_offsets[start : stop + 1] - first,
        trajectory_ids=part.trajectory_ids[start:stop],
        rollout_ids=part.rollout_ids[start:stop],
        columns={
            name: replace(each, values=each.values[spans[each.axis]])
            for name, each in part.columns.items()
        },
    )


Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where an engine is looked at.

    Attributes:
        make: Returns a new engine, with the same first weights every time.
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
