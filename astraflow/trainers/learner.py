"""One optimizer step from one batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.config.recipe import TrainerConfig
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.critic import CriticLearner
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.losses import (
    ClipRange,
    LossInputs,
    clip_range_of,
    loss_metrics,
    policy_loss,
    prepared,
    surrogate_of,
)
from astraflow.trainers.optimizer import AdamW, flat_state, read_state
from astraflow.trainers.passes import ModelPass, evened, passes_of
from astraflow.trainers.peers import ALONE, Peers, agreeing
from astraflow.trainers.rows import LossTokens, TrainRows
from astraflow.trainers.tensors import backward, to_tensor

# Rows that the log speaks of when a batch has none that moves the weights.
_LOOKED_AT_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likelihoods:
    """What a model says of the loss tokens of a batch, in their order.

    Attributes:
        logprobs: f32[K].
        entropies: f32[K], nats.
    """

    logprobs: np.ndarray
    entropies: np.ndarray

    @classmethod
    def empty(cls, count: int) -> "Likelihoods":
        """Make room for K tokens."""
        return cls(logprobs=np.zeros(count, np.float32), entropies=np.zeros(count, np.float32))

    def put(self, indices: np.ndarray, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Keep what one pass found."""
        self.logprobs[indices] = logprobs.detach().cpu().numpy()
        self.entropies[indices] = entropies.cpu().numpy()


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
            AstraflowError: CODE_UNKNOWN when the loss names code that is not here.
        """
        surrogate_of(settings.loss.surrogate)
        self._before_change = before_change
        self._model = model
        self._settings = settings
        self._reference = reference
        self._critic = critic
        self._peers = peers
        self._optimizer = AdamW(model.module.parameters(), settings.optimizer)
        self._step_count = 0
        self._attention_tokens = self._worth_of_trees()

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._step_count

    def state(self) -> Mapping[str, Any]:
        """Return what a resumed trainer needs beside the weights."""
        critic = {} if self._critic is None else {"critic": self._critic.state()}
        return {"step_count": self._step_count, **self._optimizer.state(), **critic}

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
        self._step_count = state["step_count"]

    @property
    def trained_parameters(self) -> Mapping[str, torch.Tensor]:
        """What the optimizer changes, in its order."""
        named = self._model.module.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def _critic_parameters(self) -> Mapping[str, torch.Tensor]:
        return {} if self._critic is None else self._critic.parameters

    def step(self, rows: TrainRows, *, divisor: float) -> Mapping[str, float]:
        """Change the weights once.

        Rows that can move nothing are left out; late in a run most have no advantage. Of a batch
        without any other row some are looked at, for the log.

        Args:
            rows: This rank's share of the batch.
            divisor: Of the mean over the whole batch; see `divisor_of`.

        Returns:
            Numbers for the log, of the weights before the step and the rows that are not
            left out.

        Raises:
            AstraflowError: INTERNAL when the gradient is not finite, INVALID_FIELD when a
                token is not in the model's vocabulary. The weights stay.
        """
        with agreeing(self._peers):
            rows.require_vocabulary(self._model.vocabulary_size)
        if self._critic is None or not self._peers.all_reduce_max(len(rows.loss)):
            return self._step(rows, divisor)
        values, found = self._critic.estimate(rows)
        advantages = found.advantages.astype(np.float32)
        valued = replace(rows, loss=replace(rows.loss, advantages=advantages))
        with self._critic.stepping(rows, values, found.returns, self._step_count + 1) as learned:
            metrics = self._step(valued, divisor)
        return {**metrics, **learned}

    def likelihoods(self, rows: TrainRows, chosen_rows: np.ndarray) -> Likelihoods:
        """Return what the present weights say of some rows; 0 for the tokens of the others.

        Args:
            rows: Of a batch.
            chosen_rows: bool[N].
        """
        seen = Likelihoods.empty(len(rows.loss))
        for one in self._plan(rows, chosen_rows):
            self._evaluate(rows, one, seen)
        return seen

    def _step(self, rows: TrainRows, divisor: float) -> Mapping[str, float]:
        """Change the weights once, by the advantages of the rows."""
        rows = replace(rows, loss=prepared(rows.loss, self._settings.loss, self._peers))
        is_trained = self._trained_rows(rows)
        limits = self._limits(rows, is_trained)
        seen = Likelihoods.empty(len(rows.loss))
        with self._optimizer.gathering():
            plan = self._plan(rows, is_trained)
            loss = sum((self._learn(rows, one, seen, limits, divisor) for one in plan), 0.0)
        if not self._peers.all_reduce_max(int(is_trained.any())):
            return self._stand_still(rows, limits)
        step = self._step_count + 1
        self._before_change()
        norm = self._optimizer.step(step)
        self._step_count = step
        return {
            "train/loss": self._peers.all_reduce_sum(loss),
            "train/grad_norm": norm,
            "train/lr": self._optimizer.rate(step),
            "train/trained_rows_frac": self._share(is_trained),
            **self._metrics(rows, seen, is_trained, limits),
        }

    def _trained_rows(self, rows: TrainRows) -> np.ndarray:
        """Return bool[N], what can move the weights."""
        if not self._settings.loss.moves_every_row:
            return rows.row_is_trained
        return np.isin(np.arange(rows.row_count), rows.loss.rows)

    def _limits(self, rows: TrainRows, is_trained: np.ndarray) -> ClipRange:
        """Return where ratios are clipped in this batch; M2PO has to look at all of it first."""
        settings = self._settings.loss
        if settings.m2_threshold is None:
            return clip_range_of(settings)
        at = is_trained[rows.loss.rows]
        gap = self.likelihoods(rows, is_trained).logprobs[at] - rows.loss.sampler_logprobs[at]
        joined = self._peers.all_gather
        return clip_range_of(settings, joined(gap), joined(rows.loss.advantages[at]))

    def _stand_still(self, rows: TrainRows, limits: ClipRange) -> Mapping[str, float]:
        """Count a step that moves nothing."""
        self._step_count += 1
        chosen = np.arange(rows.row_count) < _LOOKED_AT_ROWS
        return {
            "train/loss": 0.0,
            "train/grad_norm": 0.0,
            "train/lr": self._optimizer.rate(self._step_count),
            "train/trained_rows_frac": 0.0,
            **self._metrics(rows, self.likelihoods(rows, chosen), chosen, limits),
        }

    def _metrics(
        self, rows: TrainRows, seen: Likelihoods, chosen_rows: np.ndarray, limits: ClipRange
    ) -> Mapping[str, float]:
        at = chosen_rows[rows.loss.rows]
        found = loss_metrics(
            rows.loss.where(at),
            logprobs=seen.logprobs[at],
            entropies=seen.entropies[at],
            settings=self._settings.loss,
            limits=limits,
        )
        return self._peers.merged(found, weight=float(at.sum()))

    def _share(self, is_trained: np.ndarray) -> float:
        """Return which share of the whole batch's rows is trained on."""
        total = self._peers.all_reduce_sum
        return total(int(is_trained.sum())) / max(1, total(len(is_trained)))

    def _worth_of_trees(self) -> float | None:
        """Return `attention_tokens` of `passes_of`; None: rows are computed one by one."""
        models = [self._model] if self._reference is None else [self._model, self._reference]
        choice = self._settings.share_prefixes
        if choice == "never" or (choice == "auto" and self._model.device.type != "cpu"):
            return None
        return self._model.attention_tokens if all(each.takes_branches for each in models) else None

    def _plan(self, rows: TrainRows, chosen_rows: np.ndarray) -> Sequence[ModelPass]:
        plan = passes_of(
            rows,
            chosen_rows,
            max_tokens=self._settings.max_tokens_per_pass,
            # A shared token may have gone through other experts in each of its rows.
            attention_tokens=self._attention_tokens if rows.routed_experts is None else None,
        )
        return evened(plan, self._peers.all_reduce_max(len(plan)))

    def _learn(
        self, rows: TrainRows, one: ModelPass, seen: Likelihoods, limits: ClipRange, divisor: float
    ) -> float:
        """Add one pass to the gradient and return its share of the loss."""
        tokens = PassTokens.of(rows, one)
        logprobs, entropies = log_softmax_of(self._model, tokens)
        seen.put(tokens.loss_indices, logprobs, entropies)
        inputs = self._inputs(rows.loss, tokens, logprobs)
        share = policy_loss(inputs, self._settings.loss, limits, divisor=divisor)
        backward(share)
        return float(share.detach())

    def _inputs(self, loss: LossTokens, tokens: PassTokens, logprobs: torch.Tensor) -> LossInputs:
        indices = tokens.loss_indices
        rows = _numbered(loss.rows[indices])
        return LossInputs(
            logprobs=logprobs,
            sampler_logprobs=self._tensor(loss.sampler_logprobs[indices]),
            advantages=self._tensor(loss.advantages[indices]),
            weights=self._tensor(loss.weights[indices]),
            rows=self._tensor(rows),
            row_count=int(rows.max(initial=-1)) + 1,
            reference_logprobs=self._reference_logprobs(tokens),
        )

    @torch.no_grad()
    def _reference_logprobs(self, tokens: PassTokens) -> torch.Tensor | None:
        """Return what another model says, which has ways of its own through its experts."""
        if self._reference is None:
            return None
        return log_softmax_of(self._reference, replace(tokens, routed_experts=None))[0]

    @torch.no_grad()
    def _evaluate(self, rows: TrainRows, one: ModelPass, seen: Likelihoods) -> None:
        tokens = PassTokens.of(rows, one)
        seen.put(tokens.loss_indices, *log_softmax_of(self._model, tokens))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_tensor(values, self._model.device)


def _numbered(rows: np.ndarray) -> np.ndarray:
    """Return i64[k], rows numbered from 0 as they come; each is one stretch.

    Example:
        >>> _numbered(np.array([7, 7, 2, 9, 9])).tolist()
        [0, 0, 1, 2, 2]
    """
    return np.cumsum(np.diff(rows, prepend=rows[:1]) != 0)
