"""A batch as published: rows padded on the right, [batch, seq], one tensor per column.

Token columns: input_ids i32, loss_mask i32, logprobs f32, versions i32 (-1 where not sampled),
attention_mask bool; 0 behind the end of a row. Row columns, [batch]: rewards f32,
group_reward_mean f32, group_reward_std f32 (of the sample, 1 for a group of one), group_id i64.
Lists: prompt_id.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.core.batches import BatchPart

# Published name, name here, element type.
_TOKEN_COLUMNS = (
    ("input_ids", "tokens", np.int32),
    ("loss_mask", "loss_mask", np.int32),
    ("logprobs", "logprobs", np.float32),
    ("versions", "versions", np.int32),
)


def padded(batch: ReceivedBatch, *, version_offset: int = 0) -> dict[str, Any]:
    """Return the columns of a whole batch.

    Args:
        batch: All of its rows on one rank.
        version_offset: What the trainer counts from: a version of the run less this is its own.
    """
    parts = batch.parts
    lengths = np.concatenate([np.diff(part.row_offsets) for part in parts] or [np.zeros(0, int)])
    inside: np.ndarray = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    columns: dict[str, Any] = {}
    for name, ours, dtype in _TOKEN_COLUMNS:
        column = np.zeros(inside.shape, dtype)
        column[inside] = _joined(parts, ours)
        columns[name] = column
    if version_offset:
        columns["versions"] = _renumbered(columns["versions"], inside, version_offset)
    columns["attention_mask"] = inside
    return columns | _rows(batch)


def _joined(parts: Sequence[BatchPart], name: str) -> np.ndarray:
    values = [part.values(name) for part in parts]
    return values[0] if len(values) == 1 else np.concatenate(values or [np.zeros(0)])


def _renumbered(versions: np.ndarray, inside: np.ndarray, offset: int) -> np.ndarray:
    sampled = inside & (versions >= 0)
    return np.where(sampled, np.maximum(versions - offset, 0), versions).astype(np.int32)


def _rows(batch: ReceivedBatch) -> dict[str, Any]:
    parts, groups = batch.parts, batch.header.groups
    index = _joined(parts, "group_index").astype(np.int64)
    numbers = np.array([_number(group.group_id) for group in groups], np.int64)
    return {
        "rewards": _joined(parts, "rewards").astype(np.float32),
        "group_reward_mean": _joined(parts, "group_reward_mean").astype(np.float32),
        "group_reward_std": _sample_std(parts, index),
        "group_id": numbers[index],
        "prompt_id": [groups[int(at)].prompt_id for at in index],
    }


def _sample_std(parts: Sequence[BatchPart], index: np.ndarray) -> np.ndarray:
    """Return the deviation of a sample: ours is of the population, over n instead of n - 1."""
    population = _joined(parts, "group_reward_std").astype(np.float64)
    rewarded = np.isfinite(_joined(parts, "rewards"))
    ids = [each for part in parts for each in part.rollout_ids]
    rollouts = {
        pair
        for pair, has in zip(zip(index.tolist(), ids, strict=True), rewarded, strict=True)
        if has
    }
    counts = np.bincount([group for group, _ in rollouts], minlength=int(index.max(initial=-1)) + 1)
    n = counts[index]
    std = population * np.sqrt(n / np.maximum(n - 1, 1))
    return np.where(n > 1, std, 1.0).astype(np.float32)


def _number(group_id: str) -> int:
    """Return a number that stays a group's own over batches: 63 bits of its id."""
    digits = group_id.rpartition("-")[2]
    if digits.isdecimal() and len(digits) < 18:
        return int(digits)
    return int.from_bytes(blake3(group_id.encode()).digest(8), "little") >> 1
