"""Packing: rows shared out over the ranks of a trainer and laid end to end, never padded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import repeat
from math import prod
from typing import Any
from zlib import crc32

import numpy as np

from astraflow.core.batches import BatchPart, RowSource
from astraflow.core.ids import BatchId, GroupId, PolicyId, RolloutId
from astraflow.core.rollouts import (
    LOSS_WEIGHTS,
    NOT_SAMPLED,
    ROUTED_EXPERTS,
    TURN_REWARDS,
    Column,
    ColumnAxis,
    FinishReason,
    Outcome,
    Trajectory,
    filled_routes,
)
from astraflow.core.samples import Row

# A part must stay below 64 MiB on the wire. Its columns take 25 bytes per token; routes through
# the experts of a large model take many times that.
MAX_TOKENS_PER_PART = 1 << 20
_MAX_PART_NBYTES = 48 << 20
_TOKEN_NBYTES = 25
# A part of so many takes about 0.6 MB, as columns 1.4, and some ms from rows to the wire.
_TOKENS_PER_PART = 1 << 16
# What a row takes of a part whose arrays are in the payload store: some 200 bytes, and the time of
# the event loop that belongs to them.
_REFERENCE_TOKENS = 256

# Numbers on the wire: the order in which `rollout.proto` and `trajectory.proto` count.
OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(Outcome, start=1)}
FINISH_NUMBERS = {finish: number for number, finish in enumerate(FinishReason, start=1)}


def share_out(lengths: Sequence[int], rank_count: int) -> list[list[int]]:
    """Share rows out over ranks so that the largest share of tokens is small.

    Longest processing time first (Graham 1969): each row, longest first, goes to the rank with
    the fewest tokens; at most 4/3 of the best possible. Within a rank rows keep their order.

    Example:
        >>> share_out([5, 4, 3, 3, 3], 2)
        [[0, 3], [1, 2, 4]]
    """
    loads = [(0, rank) for rank in range(rank_count)]
    shares: list[list[int]] = [[] for _ in range(rank_count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heappop(loads)
        shares[rank].append(index)
        heappush(loads, (load + lengths[index], rank))
    return [sorted(share) for share in shares]


def split(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Cut rows into runs of at most so many tokens; a longer row is a run of its own."""
    runs: list[slice] = []
    start = used = 0
    for index, length in enumerate(lengths):
        if index > start and used + length > max_tokens:
            runs.append(slice(start, index))
            start, used = index, 0
        used += length
    if len(lengths):
        runs.append(slice(start, len(lengths)))
    return runs


class Share:
    """The rows of one rank in parts, each made when it is its turn.

    So a batch costs the run next to nothing, and whoever sends it holds one part at a time. What a
    row has per token stays as it came, in the sources, which `laid_out` makes columns of.

    Attributes:
        has_payloads: Whether the arrays of some row are in the payload store.
    """

    def __init__(
        self,
        batch_id: BatchId,
        rows: Sequence[Row],
        *,
        max_tokens: int,
        group_indexes: Mapping[GroupId, int],
        loss_weights: Sequence[float] | None = None,
    ) -> None:
        """Take the rows of a rank, in order, as they are now.

        Parts have at most `max_tokens`, 0: as many as travel well. Group indexes are those of the
        header.
        """
        trajectories = [row.trajectory for row in rows]
        self.has_payloads = any(each.payload is not None for each in trajectories)
        self._lengths = [each.token_count for each in trajectories]
        if not self.has_payloads:
            self._runs = runs_of(trajectories, self._lengths, max_tokens)
        else:
            # The reader lays them out as it has asked for.
            pairs = zip(trajectories, self._lengths, strict=True)
            sizes = [_REFERENCE_TOKENS if each.payload else length for each, length in pairs]
            self._runs = split(sizes, _TOKENS_PER_PART)
        self._batch_id = batch_id
        self._rows = rows
        # A row may be trained on again before the part is made.
        self._use_counts = [row.use_count for row in rows]
        self._group_indexes = group_indexes
        self._loss_weights = loss_weights

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[BatchPart]:
        return map(self._part, range(len(self)))

    @property
    def rollout_ids(self) -> list[RolloutId]:
        return [row.rollout.rollout_id for row in self._rows]

    def _part(self, index: int) -> BatchPart:
        run = self._runs[index]
        rows = self._rows[run]
        weights = repeat(None) if self._loss_weights is None else self._loss_weights[run]
        return BatchPart(
            batch_id=self._batch_id,
            index=index,
            row_offsets=_offsets(self._lengths[run]),
            trajectory_ids=tuple([row.trajectory.trajectory_id for row in rows]),
            rollout_ids=tuple([row.rollout.rollout_id for row in rows]),
            columns=_row_columns(rows, self._use_counts[run], self._group_indexes),
            sources=tuple(
                [
                    RowSource(
                        trajectory=row.trajectory,
                        advantage=row.advantage,
                        is_masked=row.is_masked,
                        loss_weight=weight,
                    )
                    for row, weight in zip(rows, weights, strict=False)
                ]
            ),
        )


def recut(parts: Sequence[BatchPart], max_tokens: int) -> list[BatchPart]:
    """Cut a rank's share again: as if no array had been in the payload store.

    Args:
        parts: All of the share, with sources that have their arrays.
        max_tokens: As the stream was asked for; 0: as many as travel well.
    """
    sources = [source for part in parts for source in part.sources]
    trajectories = [source.trajectory for source in sources]
    lengths = [each.token_count for each in trajectories]
    rows = {name: _joined([part.values(name) for part in parts]) for name in parts[0].columns}
    trajectory_ids = [each for part in parts for each in part.trajectory_ids]
    rollout_ids = [each for part in parts for each in part.rollout_ids]
    return [
        BatchPart(
            batch_id=parts[0].batch_id,
            index=index,
            row_offsets=_offsets(lengths[run]),
            trajectory_ids=tuple(trajectory_ids[run]),
            rollout_ids=tuple(rollout_ids[run]),
            columns={
                name: Column(axis=ColumnAxis.ROW, values=values[run])
                for name, values in rows.items()
            },
            sources=tuple(sources[run]),
        )
        for index, run in enumerate(runs_of(trajectories, lengths, max_tokens))
    ]


def laid_out(part: BatchPart, policy_ids: Sequence[PolicyId]) -> BatchPart:
    """Return a part with all columns, made of its sources; policies are those of the header."""
    own = part.columns
    return replace(part, columns={**own, **_columns_of(part.sources, policy_ids, own)}, sources=())


def runs_of(
    trajectories: Sequence[Trajectory], lengths: Sequence[int], max_tokens: int
) -> list[slice]:
    """Cut rows, with their arrays, into parts of at most so many tokens, and no more than travel.

    0: that travel well.
    """
    others = [each for each in trajectories if each.columns]
    travels = _MAX_PART_NBYTES // max(map(_token_nbytes, others), default=_TOKEN_NBYTES)
    bound = min(max_tokens or _TOKENS_PER_PART, MAX_TOKENS_PER_PART, travels)
    return split(lengths, bound)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])


def _columns_of(
    sources: Sequence[RowSource], policy_ids: Sequence[PolicyId], taken: Mapping[str, Column]
) -> dict[str, Column]:
    """Return the columns that are made of the rows' arrays."""
    trajectories = [source.trajectory for source in sources]
    lengths = [each.token_count for each in trajectories]
    columns = _token_columns(sources, lengths, policy_ids)
    # There may be rows whose engine does not tell their routes.
    found = [each.columns.get(ROUTED_EXPERTS) for each in trajectories]
    routes = filled_routes(lengths, [each and each.values for each in found])
    if routes is not None:
        columns[ROUTED_EXPERTS] = Column(axis=ColumnAxis.TOKEN, values=routes)
    # Rows without rewards of turns, or without weights, may lie beside rows that have some.
    for name, default in ((TURN_REWARDS, 0), (LOSS_WEIGHTS, 1)):
        found = [each.columns.get(name) for each in trajectories]
        if any(found):
            arrays = [
                np.full(length, default, np.float32) if each is None else each.values
                for each, length in zip(found, lengths, strict=True)
            ]
            values = np.concatenate(arrays, dtype=np.float32)
            columns[name] = Column(axis=ColumnAxis.TOKEN, values=values)
    columns |= _shared_columns(trajectories, taken={**taken, **columns})
    weights = [each.loss_weight for each in sources if each.loss_weight is not None]
    if weights:
        # Those of a workflow times a factor for each row.
        own, factors = columns.get(LOSS_WEIGHTS), np.repeat(np.array(weights, np.float32), lengths)
        values = factors if own is None else own.values * factors
        columns[LOSS_WEIGHTS] = Column(axis=ColumnAxis.TOKEN, values=values)
    return columns


def _token_columns(
    rows: Sequence[RowSource], lengths: Sequence[int], policy_ids: Sequence[PolicyId]
) -> dict[str, Column]:
    trajectories = [row.trajectory for row in rows]
    sampled = _joined([t.sampled_mask for t in trajectories])  # bool[T]
    spans = [(t.policy_id, span) for t in trajectories for span in t.version_spans]
    span_lengths = [span.length for _, span in spans]
    versions = np.full(len(sampled), NOT_SAMPLED, np.int64)
    versions[sampled] = np.repeat(
        np.array([span.version for _, span in spans], np.int64), span_lengths
    )
    loss_mask = sampled
    values: dict[str, np.ndarray] = {}
    if any(span.policy_id not in (None, owner) for owner, span in spans):
        number = {policy_id: index for index, policy_id in enumerate(policy_ids)}
        samplers = np.full(len(sampled), NOT_SAMPLED, np.int32)
        samplers[sampled] = np.repeat(
            np.array([number[span.policy_id or owner] for owner, span in spans], np.int32),
            span_lengths,
        )
        values["policy_index"] = samplers
        loss_mask = samplers == 0
    if any(row.is_masked for row in rows):
        loss_mask = loss_mask & ~np.repeat([row.is_masked for row in rows], lengths)
    advantages = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)
    advantages[~loss_mask] = 0
    values |= {
        "tokens": _joined([t.tokens for t in trajectories]),
        "loss_mask": loss_mask,
        "logprobs": _joined([t.logprobs for t in trajectories]),
        "versions": versions,
        "advantages": advantages,
    }
    return {name: Column(axis=ColumnAxis.TOKEN, values=array) for name, array in values.items()}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays end to end over bytes, which travel without another copy."""
    joined = b"".join([np.ascontiguousarray(array).data for array in arrays])
    return np.frombuffer(joined, arrays[0].dtype)


_ROW_COLUMNS: Mapping[str, tuple[Any, Callable[[Row], float]]] = {
    "sample_index": (np.int32, lambda row: row.rollout.sample_index),
    "agent_crc": (np.uint32, lambda row: crc32(row.trajectory.agent.encode())),
    "rewards": (np.float32, lambda row: row.reward),
    "outcomes": (np.int32, lambda row: OUTCOME_NUMBERS[row.rollout.outcome]),
    "finish_reasons": (np.int32, lambda row: FINISH_NUMBERS[row.trajectory.finish_reason]),
    "min_versions": (np.int64, lambda row: row.min_version),
    "max_versions": (np.int64, lambda row: row.max_version),
    "temperature": (np.float32, lambda row: row.trajectory.sampling.temperature),
    "group_reward_mean": (np.float32, lambda row: row.group_mean),
    "group_reward_std": (np.float32, lambda row: row.group_std),
}


def _row_columns(
    rows: Sequence[Row], use_counts: Sequence[int], group_indexes: Mapping[GroupId, int]
) -> dict[str, Column]:
    values = {
        name: np.array([value(row) for row in rows], dtype)
        for name, (dtype, value) in _ROW_COLUMNS.items()
    }
    indexes = [group_indexes[row.rollout.group_id] for row in rows]
    values |= {
        "group_index": np.array(indexes, np.int32),
        "use_count": np.array(use_counts, np.int32),
    }
    return {name: Column(axis=ColumnAxis.ROW, values=each) for name, each in values.items()}


def _token_nbytes(trajectory: Trajectory) -> int:
    """Return what a token of a row takes in a part."""
    own = (c.values for c in trajectory.columns.values() if c.axis is ColumnAxis.TOKEN)
    return _TOKEN_NBYTES + sum(values.itemsize * prod(values.shape[1:]) for values in own)


def _shared_columns(
    trajectories: Sequence[Trajectory], *, taken: Mapping[str, Column]
) -> dict[str, Column]:
    """Return the workflows' own columns: those that every row has, alike but for the length."""
    columns: dict[str, Column] = {}
    for name, column in trajectories[0].columns.items():
        found = [each.columns.get(name) for each in trajectories]
        arrays = [other.values for other in found if other is not None and _alike(column, other)]
        if name not in taken and len(arrays) == len(trajectories):
            columns[name] = Column(axis=column.axis, values=np.concatenate(arrays))
    return columns


def _alike(one: Column, other: Column) -> bool:
    return (
        one.axis is other.axis
        and one.values.dtype == other.values.dtype
        and one.values.shape[1:] == other.values.shape[1:]
    )
