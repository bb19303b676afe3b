"""GRPO's clipped surrogate, and what the log says of it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from astraflow.config.recipe import Loss
from astraflow.trainers.rows import LossTokens

# exp(20) is 5e8: a ratio that large is noise; beyond 88 single precision has none.
_MAX_LOG_RATIO = 20.0


def grpo_loss(
    logprobs: Tensor,
    *,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    settings: Loss,
    token_count: int,
) -> Tensor:
    """Return one pass's share of the batch's loss; the shares of all passes add up.

    loss = -1/K sum_t w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r_t = exp(logp_t - old_t):
    GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with clip-higher and a mean over the tokens of
    the batch (DAPO, arXiv 2503.14476, eq. 8), without a KL term.

    Args:
        logprobs: f32[k], under the weights that are trained.
        sampler_logprobs: f32[k], under what the tokens were sampled from.
        advantages: f32[k].
        weights: f32[k].
        settings: The clip range.
        token_count: K, tokens of the whole batch on which the loss applies.

    Returns:
        f32 scalar.
    """
    ratio = (logprobs - sampler_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return -(surrogate * weights).sum() / token_count


def loss_metrics(
    loss: LossTokens, *, logprobs: np.ndarray, entropies: np.ndarray, settings: Loss
) -> Mapping[str, float]:
    """Return what the log says of the tokens of a batch, before the step.

    The KL estimate is k3 (http://joschu.net/blog/kl-approx.html) of the sampler's distribution
    from the trainer's: mean of r - 1 - log r over tokens that the sampler drew.

    Args:
        loss: The K tokens.
        logprobs: f32[K], under the weights that are trained.
        entropies: f32[K], of the distributions that the tokens come from.
        settings: The clip range.
    """
    if not len(loss):
        return {}
    gap = logprobs.astype(np.float64) - loss.sampler_logprobs
    ratio = np.exp(np.clip(gap, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    is_clipped = ((loss.advantages > 0) & (ratio > high)) | ((loss.advantages < 0) & (ratio < low))
    return {
        "train/entropy": float(entropies.mean(dtype=np.float64)),
        "train/clip_frac": float(is_clipped.mean()),
        "train/ratio_mean": float(ratio.mean()),
        "train/ratio_max": float(ratio.max()),
        "mismatch/logp_abs_mean": float(np.abs(gap).mean()),
        "mismatch/logp_abs_max": float(np.abs(gap).max()),
        "mismatch/kl": float((ratio - 1 - gap).mean()),
    }
