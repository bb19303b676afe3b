"""Corrections: weights for tokens that another policy sampled than the one that is improved."""

import torch
from torch import Tensor

from astraflow.config.recipe import Correction
from astraflow.trainers.losses.inputs import LossInputs, log_ratio


def correction_of(inputs: LossInputs, settings: Correction) -> Tensor:
    """Return f[k], weights without a gradient.

    w = exp(old - sampler), old being the policy before the step: decoupled PPO (arXiv 2110.00641).
    Truncated: min(w, high), TIS (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025). Masked: w where it lies within low to high, else 0.
    """
    gap = log_ratio(inputs.logprobs.detach(), inputs.sampler_logprobs)
    match settings.level:
        case "token":
            spread = gap
        case "sequence":
            spread = inputs.row_sums(gap)
        case "geometric":
            spread = inputs.row_means(gap)
    weights = log_ratio(spread, torch.zeros_like(spread)).exp()
    if settings.style == "truncate":
        return weights.clamp(max=settings.high)
    is_kept = (weights >= settings.low) & (weights <= settings.high)
    return torch.where(is_kept, weights, 0.0)
