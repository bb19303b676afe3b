"""The critic of PPO: a model of its own that says what a state is worth, and advantages from it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from astraflow.config.policies import Packing
from astraflow.config.recipe import CriticConfig
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.optimizer import WeightOptimizer
from astraflow.trainers.passes import PassPlanner
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.tensors import backward, to_tensor


def estimate(
    values: np.ndarray,
    rows: np.ndarray,
    rewards: np.ndarray,
    *,
    gamma: float,
    lam: float,
    token_rewards: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns; a row is rewarded at its last token, and ends there.

    d_t = r_t + gamma V_(t+1) - V_t, A_t = d_t + gamma lam A_(t+1): GAE (arXiv 1506.02438, eq. 16).
    One step of the recursion is taken for all rows at once.

    Args:
        values: f[K], of the state in which each token was drawn.
        rows: i64[K], in which row each stands, rising.
        rewards: f[N], of each row.
        gamma: Discount.
        lam: 1: returns less values; 0: one step of temporal differences.
        token_rewards: f[K], what is given at each token beside that; None: nothing.

    Returns:
        f64[K], advantages; f64[K], returns: what the values should have been.

    Example:
        >>> advantages, returns = estimate(
        ...     np.array([0.5, 0.25]), np.array([0, 0]), np.array([1.0]), gamma=1.0, lam=1.0
        ... )
        >>> advantages.tolist(), returns.tolist()
        ([0.5, 0.75], [1.0, 1.0])
    """
    counts = np.bincount(rows, minlength=len(rewards))
    ends = counts.cumsum()
    exact, advantages = values.astype(np.float64), np.zeros(len(values))
    following, coming = np.zeros(len(rewards)), np.zeros(len(rewards))
    for back in range(int(counts.max(initial=0))):
        some = np.flatnonzero(counts > back)
        at = ends[some] - 1 - back
        reward = rewards[some] if back == 0 else 0.0
        if token_rewards is not None:
            reward = reward + token_rewards[at]
        surprise = reward + gamma * following[some] - exact[at]
        coming[some] = surprise + gamma * lam * coming[some]
        advantages[at], following[some] = coming[some], exact[at]
    return advantages, advantages + exact


class CriticLearner:
    """Values states, and learns from what came of them.

    It is the policy's architecture, started from the policy's first weights, with one number in
    place of the logits, 0 at first.
    """

    def __init__(
        self,
        model: CausalModel,
        settings: CriticConfig,
        *,
        max_tokens: int,
        packing: Packing = "never",
        peers: Peers = ALONE,
    ) -> None:
        """Start untrained, with a model of one output; see `valued`."""
        self._model = model
        self._settings = settings
        self._peers = peers
        self._planner = PassPlanner([model], max_tokens=max_tokens, packing=packing, peers=peers)
        self._optimizer = WeightOptimizer(model.module, settings.optimizer)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Its weights by name, in the optimizer's order."""
        return dict(self._model.module.named_parameters())

    @torch.no_grad()
    def estimate(self, rows: TrainRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values of the states in which the loss tokens were drawn, f32[K], and GAE.

        That is advantages and returns, see `estimate`.
        """
        values = np.zeros(len(rows.loss), np.float32)
        for tokens in self._passes(rows):
            values[tokens.loss_indices] = log_softmax_of(self._model, tokens)[0].cpu().numpy()
        advantages, returns = estimate(
            values,
            rows.loss.rows,
            rows.rewards,
            gamma=self._settings.gamma,
            lam=self._settings.lam,
            token_rewards=rows.loss.rewards,
        )
        return values, advantages, returns

    @contextmanager
    def stepping(
        self,
        rows: TrainRows,
        values: np.ndarray,
        returns: np.ndarray,
        step: int,
        *,
        part: np.ndarray | None = None,
    ) -> Generator[Mapping[str, float]]:
        """Learn the returns of a batch once, at the end of a block; yield numbers for the log.

        Half the larger of the squared errors of the value and of the value clipped to `clip`
        around the old one, a mean over tokens (PPO's implementation, arXiv 2005.12729, section 3).
        A block that fails leaves all as it was.

        Args:
            rows: Of the batch.
            values: f32[K], before the batch.
            returns: f64[K].
            step: Counted from 1.
            part: bool[N], the rows that it learns from; None: all.
        """
        part = np.ones(rows.row_count, np.bool_) if part is None else part
        at = part[rows.loss.rows]
        with self._optimizer.gathering():
            count = self._peers.all_reduce_sum(int(at.sum()))
            plan = self._passes(rows, part)
            loss = sum((self._learn(each, values, returns, count) for each in plan), 0.0)
            norm = self._optimizer.clip(step)
            yield {
                "critic/loss": self._peers.all_reduce_sum(loss),
                "critic/grad_norm": norm,
                **_fit(self._peers.all_gather(values[at]), self._peers.all_gather(returns[at])),
            }
            self._optimizer.apply(step)

    def state(self) -> Mapping[str, Any]:
        return {"weights": self._model.module.state_dict(), "optimizer": self._optimizer.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._model.module.load_state_dict(state["weights"])
        self._optimizer.load(state["optimizer"])

    def _learn(
        self, tokens: PassTokens, values: np.ndarray, returns: np.ndarray, count: float
    ) -> float:
        """Add one pass to the gradient and return its share of the loss, a mean over `count`."""
        found, at = log_softmax_of(self._model, tokens)[0], tokens.loss_indices
        old = to_tensor(values[at], self._model.device)
        wanted = to_tensor(returns[at].astype(np.float32), self._model.device)
        clip = self._settings.clip
        clipped = old + (found - old).clamp(-clip, clip)
        errors = torch.maximum((found - wanted).square(), (clipped - wanted).square())
        share = errors.sum() / 2 / count
        backward(share)
        return float(share.detach())

    def _passes(self, rows: TrainRows, part: np.ndarray | None = None) -> list[PassTokens]:
        chosen = np.isin(np.arange(rows.row_count), rows.loss.rows)
        chosen = chosen if part is None else chosen & part
        return [PassTokens.of(rows, one) for one in self._planner.plan(rows, chosen)]


def _fit(values: np.ndarray, returns: np.ndarray) -> Mapping[str, float]:
    """Return how well values foretold returns: the share of their variance that is no error's."""
    if not len(values):
        return {}
    spread, left = float(returns.var()), float((returns - values).var())
    return {
        "critic/value_mean": float(values.mean()),
        "critic/explained_variance": 1 - left / spread if spread else 0.0,
    }


def valued(module: nn.Module) -> CausalModel:
    """Put one number, 0 for now, in place of the logits of a causal model of transformers."""
    model = cast("Any", module)
    width = model.get_output_embeddings().in_features
    head = nn.Linear(width, 1, bias=False, device=next(module.parameters()).device)
    nn.init.zeros_(head.weight)
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    found = CausalModel(module)
    found.makes_scores = True
    return found
