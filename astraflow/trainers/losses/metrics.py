"""What the log says of the tokens of a batch, before the step."""

from collections.abc import Mapping

import numpy as np

from astraflow.config.recipe import Loss
from astraflow.trainers.losses.clip_range import ClipRange
from astraflow.trainers.rows import LossTokens

_MAX_LOG_RATIO = 20.0


def loss_metrics(
    loss: LossTokens,
    *,
    logprobs: np.ndarray,
    entropies: np.ndarray,
    settings: Loss,
    limits: ClipRange,
) -> Mapping[str, float]:
    """Return numbers for the log.

    The KL estimate is k3 (http://joschu.net/blog/kl-approx.html) of the sampler's distribution
    from the trainer's: mean of r - 1 - log r over tokens that the sampler drew.

    Args:
        loss: The K tokens.
        logprobs: f32[K], under the weights that are trained.
        entropies: f32[K], of the distributions that the tokens come from.
        settings: Of the recipe.
        limits: Where ratios are clipped.
    """
    if not len(loss):
        return {}
    gap = logprobs.astype(np.float64) - loss.sampler_logprobs
    ratio = np.exp(np.clip(gap, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    found = {
        "train/entropy": float(entropies.mean(dtype=np.float64)),
        "train/clip_frac": _clipped_share(ratio, loss.advantages, limits),
        "train/ratio_mean": float(ratio.mean()),
        "train/ratio_max": float(ratio.max()),
        "mismatch/logp_abs_mean": float(np.abs(gap).mean()),
        "mismatch/logp_abs_max": float(np.abs(gap).max()),
        "mismatch/kl": float((ratio - 1 - gap).mean()),
    }
    if settings.m2_threshold is not None:
        found |= {"train/m2": float(np.square(gap).mean()), "train/clip_high": limits.high - 1}
        found["train/clip_low"] = 1 - limits.low
    return found


def _clipped_share(ratio: np.ndarray, advantages: np.ndarray, limits: ClipRange) -> float:
    """Return the share of tokens whose ratio has left the range on the side of their advantage."""
    is_high = (advantages > 0) & (ratio > limits.high)
    is_low = (advantages < 0) & (ratio < limits.low)
    return float((is_high | is_low).mean())
