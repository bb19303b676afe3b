"""One optimizer step from one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.config.recipe import Trainer
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.losses import grpo_loss, loss_metrics
from astraflow.trainers.optimizer import AdamW
from astraflow.trainers.passes import Pass, plan_passes
from astraflow.trainers.rows import TrainRows
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


class GrpoLearner:
    """Trains a model with GRPO.

    The same weights and the same rows, in whatever order they come, give the same step bit
    for bit on one machine with one number of threads.
    """

    def __init__(self, model: CausalModel, settings: Trainer) -> None:
        self._model = model
        self._settings = settings
        self._optimizer = AdamW(model.module.parameters(), settings.optimizer)
        self._step_count = 0

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._step_count

    def state(self) -> Mapping[str, Any]:
        """Return the optimizer's state."""
        return self._optimizer.state()

    def resume(self, step: int, optimizer: Path) -> None:
        """Go on after a step, with the optimizer's state in a file; the weights are there."""
        self._optimizer.load(torch.load(optimizer, map_location="cpu", weights_only=True))
        self._step_count = step

    def step(self, rows: TrainRows, *, loss_token_count: int) -> Mapping[str, float]:
        """Change the weights once.

        Rows without any advantage are left out: they would move nothing, and late in a run
        most rows have none. Of a batch without any other row some are looked at, for the log.

        Args:
            rows: This rank's share of the batch.
            loss_token_count: Of the whole batch: the divisor of the mean.

        Returns:
            Numbers for the log, of the weights before the step and the rows that are not
            left out.

        Raises:
            AstraflowError: INTERNAL when the gradient is not finite, INVALID_FIELD when a
                token is not in the model's vocabulary. The weights stay.
        """
        self._check_tokens(rows)
        seen = Likelihoods.empty(len(rows.loss))
        is_trained = rows.row_is_trained
        loss = 0.0
        for one in self._plan(rows, is_trained):
            loss += self._learn(rows, one, seen, loss_token_count=loss_token_count)
        if not is_trained.any():
            return self._stand_still(rows)
        step = self._step_count + 1
        norm = self._optimizer.step(step)
        self._step_count = step
        return {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": self._optimizer.rate(step),
            "train/trained_rows_frac": float(is_trained.mean()),
            **self._metrics(rows, seen, is_trained),
        }

    def likelihoods(self, rows: TrainRows, chosen_rows: np.ndarray) -> Likelihoods:
        """Return what the present weights say of some rows; 0 for the tokens of the others.

        Args:
            rows: Of a batch.
            chosen_rows: bool[N].
        """
        seen = Likelihoods.empty(len(rows.loss))
        for one in self._plan(rows, chosen_rows):
            self._look(rows, one, seen)
        return seen

    def _stand_still(self, rows: TrainRows) -> Mapping[str, float]:
        """Count a step that moves nothing."""
        self._step_count += 1
        chosen = np.arange(rows.row_count) < _LOOKED_AT_ROWS
        return {
            "train/loss": 0.0,
            "train/grad_norm": 0.0,
            "train/lr": self._optimizer.rate(self._step_count),
            "train/trained_rows_frac": 0.0,
            **self._metrics(rows, self.likelihoods(rows, chosen), chosen),
        }

    def _metrics(
        self, rows: TrainRows, seen: Likelihoods, chosen_rows: np.ndarray
    ) -> Mapping[str, float]:
        at = chosen_rows[rows.loss.rows]
        return loss_metrics(
            rows.loss.where(at),
            logprobs=seen.logprobs[at],
            entropies=seen.entropies[at],
            settings=self._settings.loss,
        )

    def _plan(self, rows: TrainRows, chosen_rows: np.ndarray) -> Sequence[Pass]:
        indices = np.flatnonzero(chosen_rows)
        # Sums in single precision depend on their order; that of arrival depends on timing.
        indices = indices[np.argsort(rows.fingerprints[indices], kind="stable")]
        plan = plan_passes(rows.lengths[indices], max_tokens=self._settings.max_tokens_per_pass)
        return [Pass(rows=indices[one.rows], length=one.length) for one in plan]

    def _learn(
        self, rows: TrainRows, one: Pass, seen: Likelihoods, *, loss_token_count: int
    ) -> float:
        """Add one pass to the gradient and return its share of the loss."""
        tokens = PassTokens.of(rows, one)
        logprobs, entropies = log_softmax_of(self._model, tokens)
        seen.put(tokens.loss_indices, logprobs, entropies)
        indices, loss = tokens.loss_indices, rows.loss
        share = grpo_loss(
            logprobs,
            sampler_logprobs=self._tensor(loss.sampler_logprobs[indices]),
            advantages=self._tensor(loss.advantages[indices]),
            weights=self._tensor(loss.weights[indices]),
            settings=self._settings.loss,
            token_count=loss_token_count,
        )
        backward(share)
        return float(share.detach())

    @torch.no_grad()
    def _look(self, rows: TrainRows, one: Pass, seen: Likelihoods) -> None:
        tokens = PassTokens.of(rows, one)
        seen.put(tokens.loss_indices, *log_softmax_of(self._model, tokens))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_tensor(values, self._model.device)

    def _check_tokens(self, rows: TrainRows) -> None:
        largest = int(rows.tokens.max(initial=0))
        if largest >= self._model.vocabulary_size:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"token {largest} of a batch is not in the model's vocabulary of "
                f"{self._model.vocabulary_size}; RaaS and trainer need the same tokenizer",
            )
