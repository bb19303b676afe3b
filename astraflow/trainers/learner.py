"""One step from one batch: an optimizer update, or one for each minibatch of each epoch."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from astraflow.config.recipe import TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.critic import CriticLearner
from astraflow.trainers.likelihood import Likelihoods, PassTokens, log_softmax_of
from astraflow.trainers.losses import (
    ClipRange,
    LossInputs,
    clip_range_of,
    divisor_of,
    loss_metrics,
    policy_loss,
    prepared,
    try_own_code,
)
from astraflow.trainers.optimizer import WeightOptimizer, flat_state, read_state
from astraflow.trainers.pairs import compare, log_ratios, scored_at_the_end
from astraflow.trainers.passes import ModelPass, PassPlanner, minibatches_of
from astraflow.trainers.peers import ALONE, Peers, agreeing
from astraflow.trainers.router_balance import RouterBalance
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.tensors import backward, to_tensor
from astraflow.trainers.turn_rewards import turn_advantages

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Rows that the log speaks of when a batch has none that moves the weights.
_LOOKED_AT_ROWS = 16

Valued = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What a critic says of a batch: values, advantages and returns; see `CriticLearner.estimate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """What of a batch stays as it was before its first update.

    Attributes:
        rows: Of the batch, with the advantages and weights that the recipe asks for.
        is_trained: bool[N], which of them can move the weights.
        limits: Where ratios are clipped.
        old_logprobs: f32[K], under the policy before the batch; None: the one update knows them.
        reference_logprobs: f32[K], under the reference; None: there is none.
    """

    rows: TrainRows
    is_trained: np.ndarray
    limits: ClipRange
    old_logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinibatchStep:
    """What came of one update.

    Attributes:
        metrics: Of it alone.
        indices: i64[k], the loss tokens that it trained on.
        seen: Of these, before it.
    """

    metrics: Mapping[str, float]
    indices: np.ndarray
    seen: Likelihoods


class PolicyLearner:
    """Trains a model with the loss of its recipe.

    The same weights and the same rows, in whatever order they come, give the same step bit
    for bit on one machine with one number of threads.
    """

    def __init__(
        self,
        model: CausalModel,
        settings: TrainerConfig,
        *,
        reference: CausalModel | None = None,
        critic: CriticLearner | None = None,
        before_change: Callable[[], None] = lambda: None,
        peers: Peers = ALONE,
    ) -> None:
        """Start with the model's weights.

        Args:
            model: To be trained.
            settings: Of its trainer.
            reference: Of a KL term, if the loss has one; its weights stay.
            critic: Makes advantages of rewards; None: they come with the batch.
            before_change: Called just before the weights change.
            peers: The ranks that share every batch; all make the same calls.

        Raises:
            AstraflowError: CODE_UNKNOWN when the loss or the optimizer names code that is not
                here, INVALID_FIELD when that does not work.
        """
        try_own_code(settings.loss)
        self._before_change = before_change
        self._model = model
        self._settings = settings
        self._reference = reference
        self._critic = critic
        self._peers = peers
        self._optimizer = WeightOptimizer(model.module, settings.optimizer)
        coefficient = settings.loss.router_balance_coefficient
        self._balance = RouterBalance(model.module, coefficient)
        self.step_count = 0
        self._planner = PassPlanner(
            [model] if reference is None else [model, reference],
            max_tokens=settings.max_tokens_per_pass,
            share_prefixes=settings.share_prefixes,
            packing=settings.packing,
            peers=peers,
        )

    def state(self) -> Mapping[str, Any]:
        """Return what a resumed trainer needs beside the weights."""
        critic = {} if self._critic is None else {"critic": self._critic.state()}
        return {"step_count": self.step_count, **self._optimizer.state(), **critic}

    def flat_state(self) -> Mapping[str, torch.Tensor]:
        """Return it by the names of parameters, as torch.distributed.checkpoint takes it."""
        return flat_state(self.state(), [*self.trained_parameters], [*self._critic_parameters])

    def resume(self, checkpoint: Path) -> None:
        """Go on with what `state` returned, in a checkpoint; the weights are there.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot be read.
        """
        state = read_state(checkpoint, self.trained_parameters, self._critic_parameters)
        self._optimizer.load(state)
        if self._critic is not None:
            self._critic.load(state["critic"])
        self.step_count = state["step_count"]

    @property
    def trained_parameters(self) -> Mapping[str, torch.Tensor]:
        """What the optimizer changes, in its order."""
        named = self._model.module.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def _critic_parameters(self) -> Mapping[str, torch.Tensor]:
        return {} if self._critic is None else self._critic.parameters

    def step(self, rows: TrainRows, *, divisor: float) -> Mapping[str, float]:
        """Change the weights, once for each minibatch of each epoch.

        Rows that can move nothing are left out; late in a run most have no advantage. Of a batch
        without any other row some are looked at, for the log.

        Args:
            rows: This rank's share of the batch.
            divisor: Of the mean over the whole batch; see `divisor_of`. Minibatches have their own.

        Returns:
            Numbers for the log, of the weights before each update and the rows that are not
            left out.

        Raises:
            AstraflowError: INTERNAL when the gradient of the first update is not finite,
                INVALID_FIELD when a token is not in the model's vocabulary. The weights stay.
        """
        with agreeing(self._peers):
            rows.require_vocabulary(self._model.vocabulary_size)
        if self._settings.loss.makes_reward_model:
            rows = scored_at_the_end(rows)
        valued: Valued | None = None
        if self._critic is not None and self._peers.all_reduce_max(len(rows.loss)):
            valued = self._critic.estimate(rows)
        settings = self._settings
        batch = self._prepare(rows, valued)
        # By the rows as they came: what a critic says of them is rounded, by whatever passes.
        parts = minibatches_of(
            rows, count=settings.minibatches, epochs=settings.epochs, peers=self._peers
        )
        updates: list[MinibatchStep] = []
        learned: list[Mapping[str, float]] = []
        for part in parts:
            try:
                with self._critic_update(rows, part, valued) as seen:
                    made = self._update(
                        batch,
                        part,
                        divisor if settings.minibatches == 1 else self._divisor(rows, part),
                        is_first=not updates,
                    )
            except Exception as error:
                if not updates and not learned:
                    raise
                if not isinstance(error, AstraflowError) or error.reason is not Reason.INTERNAL:
                    # The weights are no version, and other ranks may have made this update.
                    name = type(error).__name__
                    raise RuntimeError(f"{name} between two updates of a batch") from error
                log.warning("the batch ends before its last update", why=error.message)
                break
            updates += [] if made is None else [made]
            learned += [seen] if seen else []
        self.step_count += 1
        found = self._log(batch, updates) if updates else self._stand_still(batch)
        return {**found, **_means(learned)}

    @torch.no_grad()
    def likelihoods(
        self, rows: TrainRows, chosen_rows: np.ndarray, *, model: CausalModel | None = None
    ) -> Likelihoods:
        """Return what the weights, or those of a model, say of rows, bool[N]; 0 for the others."""
        seen = Likelihoods.empty(len(rows.loss))
        for one in self._planner.plan(rows, chosen_rows):
            tokens = PassTokens.of(rows, one)
            seen.put(tokens.loss_indices, *log_softmax_of(model or self._model, tokens))
        return seen

    def _prepare(self, rows: TrainRows, valued: Valued | None) -> PreparedBatch:
        settings = self._settings
        reference = None
        if self._reference is not None:
            # It has ways of its own through its experts.
            own = replace(rows, routed_experts=None)
            chosen = self._trained_rows(own)
            reference = self.likelihoods(own, chosen, model=self._reference).logprobs
        loss = rows.loss
        if valued is not None:
            # It has seen the rewards of turns.
            loss = replace(loss, advantages=valued[1].astype(np.float32))
        else:
            earned = turn_advantages(rows, settings.advantages, peers=self._peers)
            loss = replace(loss, advantages=loss.advantages + earned)
        loss = prepared(loss, settings.loss, self._peers, reference_logprobs=reference)
        rows = replace(rows, loss=loss)
        is_trained, old = self._trained_rows(rows), None
        is_moving = settings.loss.old == "recomputed" and settings.minibatches * settings.epochs > 1
        if is_moving or settings.loss.m2_threshold is not None:
            old = self.likelihoods(rows, is_trained).logprobs
        return PreparedBatch(
            rows=rows,
            is_trained=is_trained,
            limits=self._limits(rows, is_trained, old),
            old_logprobs=old if is_moving else None,
            reference_logprobs=reference,
        )

    def _update(
        self, batch: PreparedBatch, part: np.ndarray, divisor: float, *, is_first: bool
    ) -> MinibatchStep | None:
        """Change the weights once, by some rows; None: none of them moves anything."""
        rows, chosen = batch.rows, part & batch.is_trained
        if not self._peers.all_reduce_max(int(chosen.any())):
            return None
        compared: Mapping[str, float] = {}
        if self._settings.loss.is_paired:
            found = self._compared(batch)
            if found is None:
                return None
            batch, compared = found
            divisor = 1.0
        seen, indices = Likelihoods.empty(len(rows.loss)), np.flatnonzero(chosen[rows.loss.rows])
        count = self._peers.all_reduce_sum(len(indices))
        with self._optimizer.gathering():
            plan = self._planner.plan(rows, chosen)
            loss = sum((self._learn(batch, one, seen, divisor, count) for one in plan), 0.0)
        if is_first:
            self._before_change()
        norm = self._optimizer.step(self.step_count + 1)
        metrics = {"train/loss": self._peers.all_reduce_sum(loss), "train/grad_norm": norm}
        if self._balance.is_on:
            metrics["train/router_imbalance"] = self._peers.all_reduce_sum(seen.imbalance)
        return MinibatchStep(
            metrics={**metrics, **compared}, indices=indices, seen=seen.where(indices)
        )

    def _compared(self, batch: PreparedBatch) -> tuple[PreparedBatch, Mapping[str, float]] | None:
        """Return a batch whose advantages are what pairs make of the present weights.

        None: it has no pairs.
        """
        rows, settings = batch.rows, self._settings.loss
        beta, loss = settings.pairs.beta, rows.loss
        reference = batch.reference_logprobs
        said = self.likelihoods(rows, batch.is_trained).logprobs
        if reference is None:
            # Scores are as they are.
            beta, reference = 1.0, np.zeros_like(said)
        values = beta * log_ratios(loss, said, reference, rows.row_count)
        found = compare(values, rows, settings.pairs, self._peers)
        if found is None:
            return None
        slopes, metrics = found
        advantages = (-beta * slopes)[loss.rows].astype(np.float32)
        moved = replace(rows, loss=replace(loss, advantages=advantages))
        return replace(batch, rows=moved), metrics

    @contextmanager
    def _critic_update(
        self, rows: TrainRows, part: np.ndarray, valued: Valued | None
    ) -> Generator[Mapping[str, float]]:
        """Change the critic's weights, too, at the end of a block, by some rows."""
        if self._critic is None or valued is None:
            yield {}
            return
        values, _, returns = valued
        step = self.step_count + 1
        with self._critic.stepping(rows, values, returns, step, part=part) as metrics:
            yield metrics

    def _divisor(self, rows: TrainRows, part: np.ndarray) -> float:
        """Return that of a minibatch, which all ranks have rows of."""
        token_count = int(part[rows.loss.rows].sum())
        return divisor_of(
            self._settings.loss,
            row_count=self._peers.all_reduce_sum(int(part.sum())),
            token_count=self._peers.all_reduce_sum(token_count),
        )

    def _log(self, batch: PreparedBatch, updates: Sequence[MinibatchStep]) -> Mapping[str, float]:
        is_one = self._settings.minibatches * self._settings.epochs == 1
        trained, total = batch.is_trained, self._peers.all_reduce_sum
        return {
            **_means([each.metrics for each in updates]),
            "train/lr": self._optimizer.rate(self.step_count),
            "train/trained_rows_frac": total(int(trained.sum())) / max(1, total(len(trained))),
            **({} if is_one else {"train/updates": float(len(updates))}),
            **self._metrics(batch, updates),
        }

    def _trained_rows(self, rows: TrainRows) -> np.ndarray:
        """Return bool[N], what can move the weights."""
        if not self._settings.loss.moves_every_row:
            return rows.row_is_trained
        return np.isin(np.arange(rows.row_count), rows.loss.rows)

    def _limits(
        self, rows: TrainRows, is_trained: np.ndarray, old_logprobs: np.ndarray | None
    ) -> ClipRange:
        """Return where ratios are clipped in this batch; M2PO looks at all of it for that."""
        settings = self._settings.loss
        if settings.m2_threshold is None or old_logprobs is None:
            return clip_range_of(settings)
        at = is_trained[rows.loss.rows]
        gap = old_logprobs[at] - rows.loss.sampler_logprobs[at]
        joined = self._peers.all_gather
        return clip_range_of(settings, joined(gap), joined(rows.loss.advantages[at]))

    def _stand_still(self, batch: PreparedBatch) -> Mapping[str, float]:
        """Return numbers for the log of a batch that moves nothing."""
        chosen = np.arange(batch.rows.row_count) < _LOOKED_AT_ROWS
        seen = self.likelihoods(batch.rows, chosen)
        indices = np.flatnonzero(chosen[batch.rows.loss.rows])
        shown = MinibatchStep(metrics={}, indices=indices, seen=seen.where(indices))
        return {
            "train/loss": 0.0,
            "train/grad_norm": 0.0,
            "train/lr": self._optimizer.rate(self.step_count),
            "train/trained_rows_frac": 0.0,
            **self._metrics(replace(batch, old_logprobs=None), [shown]),
        }

    def _metrics(
        self, batch: PreparedBatch, updates: Sequence[MinibatchStep]
    ) -> Mapping[str, float]:
        if self._settings.loss.is_paired:
            return {}
        indices = np.concatenate([each.indices for each in updates])
        old = batch.old_logprobs
        found = loss_metrics(
            batch.rows.loss.where(indices),
            logprobs=np.concatenate([each.seen.logprobs for each in updates]),
            entropies=np.concatenate([each.seen.entropies for each in updates]),
            settings=self._settings.loss,
            limits=batch.limits,
            old_logprobs=None if old is None else old[indices],
        )
        return self._peers.merged(found, weight=float(len(indices)))

    def _learn(
        self,
        batch: PreparedBatch,
        one: ModelPass,
        seen: Likelihoods,
        divisor: float,
        loss_token_count: float,
    ) -> float:
        """Add one pass to the gradient and return its share of the loss."""
        tokens = PassTokens.of(batch.rows, one)
        settings = self._settings.loss
        has_bonus = settings.entropy_coefficient > 0
        with self._balance.recording():
            logprobs, entropies = log_softmax_of(
                self._model, tokens, needs_entropy_gradient=has_bonus
            )
        seen.put(tokens.loss_indices, logprobs, entropies)
        inputs = self._inputs(batch, tokens.loss_indices, logprobs)
        if has_bonus:
            inputs = replace(inputs, entropies=entropies)
        share = policy_loss(inputs, settings, batch.limits, divisor=divisor)
        if self._balance.is_on:
            part = len(tokens.targets) / max(1.0, loss_token_count)
            extra, imbalance = self._balance.loss(tokens.slots, share=part)
            share = share + extra.to(share.device)
            seen.imbalance += imbalance
        backward(share)
        return float(share.detach())

    def _inputs(
        self, batch: PreparedBatch, indices: np.ndarray, logprobs: torch.Tensor
    ) -> LossInputs:
        loss = batch.rows.loss
        rows = _numbered(loss.rows[indices])
        old, reference = batch.old_logprobs, batch.reference_logprobs
        return LossInputs(
            logprobs=logprobs,
            sampler_logprobs=self._tensor(loss.sampler_logprobs[indices]),
            advantages=self._tensor(loss.advantages[indices]),
            weights=self._tensor(loss.weights[indices]),
            rows=self._tensor(rows),
            row_count=int(rows.max(initial=-1)) + 1,
            old_logprobs=None if old is None else self._tensor(old[indices]),
            reference_logprobs=None if reference is None else self._tensor(reference[indices]),
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_tensor(values, self._model.device)


def _means(found: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the mean of each number over updates."""
    names = dict.fromkeys(name for each in found for name in each)
    known = {name: [each[name] for each in found if name in each] for name in names}
    return {name: sum(values) / len(values) for name, values in known.items()}


def _numbered(rows: np.ndarray) -> np.ndarray:
    """Return i64[k], rows numbered from 0 as they come; each is one stretch.

    Example:
        >>> _numbered(np.array([7, 7, 2, 9, 9])).tolist()
        [0, 0, 1, 2, 2]
    """
    return np.cumsum(np.diff(rows, prepend=rows[:1]) != 0)
