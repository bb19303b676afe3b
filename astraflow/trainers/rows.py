"""The rows of a batch as a loss wants them: flat arrays, and where the loss applies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from astraflow.core.batches import BatchPart
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.rollouts import ROUTED_EXPERTS, TURN_REWARDS, filled_routes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The tokens of a batch on which the loss applies, in the order of the rows.

    Attributes:
        positions: i64[K] in the tokens of the batch.
        rows: i64[K], which row each lies in.
        sampler_logprobs: f32[K], under what the token was sampled from.
        advantages: f32[K].
        weights: f32[K], factor on the loss.
        temperatures: f32[K], 1 where the logits are used as they are.
        rewards: f32[K], given within the row, at the last of these tokens before; None: none is.
    """

    positions: np.ndarray
    rows: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    temperatures: np.ndarray
    rewards: np.ndarray | None = None

    @classmethod
    def plain(cls, positions: np.ndarray, rows: np.ndarray) -> "LossTokens":
        """Return tokens that all count the same, of which no sampler and no advantage is known."""
        zeros, ones = np.zeros(len(positions), np.float32), np.ones(len(positions), np.float32)
        return cls(
            positions=positions,
            rows=rows,
            sampler_logprobs=zeros,
            advantages=zeros,
            weights=ones,
            temperatures=ones,
        )

    def __len__(self) -> int:
        return len(self.positions)

    def where(self, chosen: np.ndarray) -> "LossTokens":
        """Return the tokens that are chosen, bool[K], or those at indices, i64[k]."""
        known: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, values in known.items():
            known[name] = None if values is None else values[chosen]
        return LossTokens(**known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRows:
    """Rows of one batch, end to end.

    Attributes:
        tokens: i32[T].
        offsets: i64[N + 1]; row i is `[offsets[i], offsets[i + 1])`.
        loss: Where the loss applies.
        rewards: f32[N]; NaN: not known.
        min_versions: i64[N], oldest version that sampled in the row; -1: not known.
        max_versions: i64[N], newest.
        routed_experts: u16[T, layers, k], which experts each token went through as it was
            sampled, see `core.rollouts`; None: not known.
        compared_with: u64[N], equal for rows of one group and agent.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    loss: LossTokens
    rewards: np.ndarray
    min_versions: np.ndarray
    max_versions: np.ndarray
    routed_experts: np.ndarray | None = None
    compared_with: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def lengths(self) -> np.ndarray:
        """i64[N], tokens of each row."""
        return np.diff(self.offsets)

    @property
    def row_count(self) -> int:
        return len(self.offsets) - 1

    @property
    def fingerprints(self) -> np.ndarray:
        """u64[N], of each row's tokens and of the numbers of its loss.

        An order of rows that does not depend on their arrival: those of one number are equal.
        """
        found, loss = self._fingerprints(self.offsets[1:]), self.loss
        mixed = scatter((loss.positions - self.offsets[loss.rows]).astype(np.uint64))
        for numbers in (loss.sampler_logprobs, loss.advantages, loss.weights):
            mixed = scatter(mixed ^ numbers.astype(np.float32).view(np.uint32))
        np.add.at(found, loss.rows, mixed)
        return found

    @property
    def prompt_fingerprints(self) -> np.ndarray:
        """u64[N], of each row's tokens before the first that the loss applies to."""
        ends = self.offsets[1:].copy()
        rows, first = np.unique(self.loss.rows, return_index=True)
        ends[rows] = self.loss.positions[first]
        return self._fingerprints(ends)

    def _fingerprints(self, ends: np.ndarray) -> np.ndarray:
        """Return u64[N], of the tokens of each row before `ends`, i64[N]."""
        places = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        mixed = scatter(self.tokens.astype(np.uint64) + scatter(places.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, np.uint64), mixed.cumsum(dtype=np.uint64)])
        return sums[ends] - sums[self.offsets[:-1]]

    @property
    def row_is_trained(self) -> np.ndarray:
        """bool[N], whether the row can move the weights.

        A row whose advantages are all 0 (its group was all right or all wrong) adds exactly
        nothing to the gradient of a clipped surrogate; nor does one whose tokens all weigh 0. A
        sequence's advantage is that of its tokens together, whatever each of them weighs.
        """
        earns, weighs = np.zeros((2, self.row_count), np.bool_)
        earns[self.loss.rows[self.loss.advantages != 0]] = True
        weighs[self.loss.rows[self.loss.weights != 0]] = True
        return earns & weighs

    def require_vocabulary(self, size: int) -> None:
        """Check that a model knows every token, when it knows so many from 0.

        Raises:
            AstraflowError: INVALID_FIELD naming a token.
        """
        lowest, highest = int(self.tokens.min(initial=0)), int(self.tokens.max(initial=0))
        if lowest < 0 or highest >= size:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"token {highest if highest >= size else lowest} of a batch is not in the model's "
                f"vocabulary of {size}; RaaS and trainer need the same tokenizer",
            )

    @classmethod
    def from_parts(cls, parts: Sequence[BatchPart]) -> "TrainRows":
        """Join the parts of a batch; there may be none, or none with rows, for this rank.

        Raises:
            AstraflowError: INVALID_FIELD when a column is missing or not finite, or the loss
                applies to the first token of a row, which nothing predicts.
        """
        parts = [part for part in parts if part.row_count]
        if not parts:
            nothing = np.zeros(0, np.int64)
            no_tokens = LossTokens.plain(nothing, nothing)
            return cls.of(np.zeros(0, np.int32), np.zeros(1, np.int64), no_tokens)
        tokens = _column(parts, "tokens")
        lengths = [np.diff(part.row_offsets) for part in parts]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        return cls(
            tokens=tokens,
            offsets=offsets,
            loss=_loss_tokens(parts, offsets),
            rewards=_row_column(parts, "rewards", default=np.nan, dtype=np.float32),
            min_versions=_row_column(parts, "min_versions", default=-1, dtype=np.int64),
            max_versions=_row_column(parts, "max_versions", default=-1, dtype=np.int64),
            routed_experts=_routes(parts),
            compared_with=_compared_with(parts),
        )

    @classmethod
    def of(cls, tokens: np.ndarray, offsets: np.ndarray, loss: LossTokens) -> "TrainRows":
        """Return rows of which no reward and no version is known."""
        unknown = np.full(len(offsets) - 1, -1, np.int64)
        return cls(
            tokens=tokens,
            offsets=offsets,
            loss=loss,
            rewards=np.full(len(unknown), np.nan, np.float32),
            min_versions=unknown,
            max_versions=unknown,
        )


def scatter(values: np.ndarray) -> np.ndarray:
    """Return u64 values as if drawn: SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _loss_tokens(parts: Sequence[BatchPart], offsets: np.ndarray) -> LossTokens:
    mask = _column(parts, "loss_mask")
    if mask[offsets[:-1]].any():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"batch {parts[0].batch_id}: the loss applies to the first token of a row, which "
            "nothing predicts; a trajectory begins with at least one prompt token",
        )
    positions = np.flatnonzero(mask)
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[positions]
    temperature = _row_column(parts, "temperature", default=1.0, dtype=np.float32)
    return _finite(
        parts[0].batch_id,
        LossTokens(
            positions=positions,
            rows=rows,
            sampler_logprobs=_column(parts, "logprobs")[positions],
            advantages=_column(parts, "advantages")[positions],
            weights=_floats(parts, "loss_weights", 1)[positions],
            # Greedy sampling reports the log-probabilities of the logits as they are.
            temperatures=np.where(temperature > 0, temperature, np.float32(1))[rows],
            rewards=_turn_rewards(parts, offsets, positions, rows),
        ),
    )


def _finite(batch_id: BatchId, tokens: LossTokens) -> LossTokens:
    """Return loss tokens whose numbers all are numbers."""
    names = ["sampler_logprobs", "advantages", "weights", "temperatures"]
    for name in names if tokens.rewards is None else [*names, "rewards"]:
        odd = np.flatnonzero(~np.isfinite(getattr(tokens, name)))
        if len(odd):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"batch {batch_id}: {name} has {getattr(tokens, name)[odd[0]]} in row "
                f"{tokens.rows[odd[0]]}, {len(odd)} of {len(tokens)} loss tokens are not finite; "
                "look at the rewards and at the engine that sampled",
            )
    return tokens


def _column(parts: Sequence[BatchPart], name: str) -> np.ndarray:
    for part in parts:
        if name not in part.columns:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"batch {part.batch_id} part {part.index} has no column {name}, which GRPO needs",
            )
    return np.concatenate([part.values(name) for part in parts])


def _floats(parts: Sequence[BatchPart], name: str, default: float) -> np.ndarray:
    """Return f32[T], a column of tokens; of parts without it the default."""
    return np.concatenate(
        [
            part.values(name)
            if name in part.columns
            else np.full(part.token_count, default, np.float32)
            for part in parts
        ]
    )


def _turn_rewards(
    parts: Sequence[BatchPart], offsets: np.ndarray, positions: np.ndarray, rows: np.ndarray
) -> np.ndarray | None:
    """Return f32[K], rewards of turns: each at the last loss token of its row up to where it is.

    What is given before the first of these is nobody's.
    """
    if not any(TURN_REWARDS in part.columns for part in parts):
        return None
    given = _floats(parts, TURN_REWARDS, 0)
    at = np.flatnonzero(given)
    earned = np.searchsorted(positions, at, side="right") - 1
    row = np.searchsorted(offsets, at, side="right") - 1
    rewards = np.zeros(len(positions), np.float32)
    if len(positions):
        is_known = (earned >= 0) & (rows[earned] == row)
        np.add.at(rewards, earned[is_known], given[at[is_known]])
    return rewards


def _compared_with(parts: Sequence[BatchPart]) -> np.ndarray:
    """Return u64[N]: the group, and the agent in it."""
    groups = _row_column(parts, "group_index", default=-1, dtype=np.int32)
    agents = _row_column(parts, "agent_crc", default=0, dtype=np.uint32)
    return groups.astype(np.int64).view(np.uint64) << np.uint64(32) | agents


def _routes(parts: Sequence[BatchPart]) -> np.ndarray | None:
    """Join the experts of all parts; parts without them, as of dense rows, take their own."""
    found = [part.columns.get(ROUTED_EXPERTS) for part in parts]
    return filled_routes(
        [part.token_count for part in parts], [each and each.values for each in found]
    )


def _row_column(
    parts: Sequence[BatchPart], name: str, *, default: float, dtype: type[np.generic]
) -> np.ndarray:
    if all(name in part.columns for part in parts):
        return _column(parts, name)
    return np.full(sum(part.row_count for part in parts), default, dtype)
