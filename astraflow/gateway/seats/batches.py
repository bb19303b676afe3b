"""Batches of one trainer: the one in its hands, those that wait, and how they are written.

As published, rows are padded on the right, [batch, seq], one tensor per column. Token columns:
input_ids i32, loss_mask i32, logprobs f32, versions i32 (-1 where not sampled), attention_mask
bool; 0 behind the end of a row. Row columns, [batch]: rewards f32, group_reward_mean f32,
group_reward_std f32 (of the sample, 1 for a group of one), group_id i64. Lists: prompt_id.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.core.batches import BatchPart, EndOfData
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId

# Published name, name here, element type.
_TOKEN_COLUMNS = (
    ("input_ids", "tokens", np.int32),
    ("loss_mask", "loss_mask", np.int32),
    ("logprobs", "logprobs", np.float32),
    ("versions", "versions", np.int32),
)


class BatchDesk:
    """Hands out one batch until it is settled: to whoever asks again, the same one.

    Attributes:
        in_hand: What was handed out and is not settled.
        drawn_count: Batches handed out, each counted once.
        is_delivered: Whether all of the batch in hand was written to its reader.
    """

    def __init__(self) -> None:
        self.in_hand: ReceivedBatch | None = None
        self.drawn_count = 0
        self.is_delivered = False
        self._drawn_for: int | None = None
        self._waiting: OrderedDict[BatchId, ReceivedBatch] = OrderedDict()
        # A copy may come while the ack of a batch is on its way.
        self._settled: deque[BatchId] = deque(maxlen=64)
        self._end: EndOfData | None = None
        self._error: AstraflowError | None = None
        self._news = asyncio.Event()

    @property
    def held(self) -> tuple[BatchId, ...]:
        """Batches that are in hand or wait."""
        in_hand = () if self.in_hand is None else (self.in_hand.header.batch_id,)
        return (*in_hand, *self._waiting)

    def put(self, batch: ReceivedBatch) -> None:
        """Take a batch of the stream, unless it is or was here."""
        batch_id = batch.header.batch_id
        if batch_id not in self.held and batch_id not in self._settled:
            self._waiting[batch_id] = batch
            self._news.set()

    def keep(self, batch_ids: tuple[BatchId, ...]) -> None:
        """Drop what is no longer leased to this trainer."""
        for batch_id in self._waiting.keys() - set(batch_ids):
            del self._waiting[batch_id]

    def end(self, end_of_data: EndOfData) -> None:
        """Note that nothing follows what waits."""
        self._end = end_of_data
        self._news.set()

    def close(self, error: AstraflowError) -> None:
        """Hand out nothing more."""
        self._error = self._error or error
        self._news.set()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._error is not None

    @property
    def is_over(self) -> bool:
        """Whether the data has ended and all of it was settled."""
        return self._end is not None and not self.held

    def is_done_with(self, label: int | None) -> bool:
        """Whether asking for the batch after a version says that the one in hand was used."""
        if self.in_hand is None or not self.is_delivered:
            return False
        return label is None or label != self._drawn_for

    def require_open(self) -> None:
        """Raise what it was closed with."""
        if self._error is not None:
            raise self._error

    async def take(self, label: int | None) -> ReceivedBatch:
        """Return the batch in hand, or wait for the next.

        Args:
            label: Version after which it is asked for; None: not said.

        Raises:
            AstraflowError: RUN_ENDED when there will be none; what the desk was closed with.
        """
        while self.in_hand is None:
            if self._waiting and not self.is_closed:
                self.in_hand = self._waiting.popitem(last=False)[1]
                self._drawn_for, self.is_delivered = label, False
                self.drawn_count += 1
            elif self._end is not None:
                raise AstraflowError(
                    Reason.RUN_ENDED,
                    f"no batch follows: {self._end.cause} after {self._end.batch_count} batches",
                )
            else:
                self.require_open()
                self._news.clear()
                await self._news.wait()
        return self.in_hand

    def settle(self) -> None:
        """Forget the batch in hand."""
        if self.in_hand is not None:
            self._settled.append(self.in_hand.header.batch_id)
            self.in_hand = None


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
