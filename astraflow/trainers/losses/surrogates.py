"""Surrogates: what a token costs, by the ratio of its likelihoods and its advantage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from astraflow.config.recipe import Loss
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.losses.clip_range import ClipRange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What surrogates are made of.

    Attributes:
        log_ratio: f[k], log r, of the policy to the old one.
        logprobs: f[k], log p of the policy.
        advantages: f[k], A.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor


def clip(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Negated minimum of r A and c A, f[k], c the clipped ratio: PPO (arXiv 1707.06347, eq. 7).

    With a dual clip d no gain is less than d A where A < 0 (arXiv 1912.09729).
    """
    ratio, advantages = terms.log_ratio.exp(), terms.advantages
    clipped = ratio.clamp(limits.low, limits.high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        bounded = torch.maximum(gain, settings.dual_clip * advantages)
        gain = torch.where(advantages < 0, bounded, gain)
    return -gain


def cispo(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Weighted -A log p, f[k], the weight clip(r) without a gradient: MiniMax-M1 (2506.13585)."""
    del settings
    weights = terms.log_ratio.detach().exp().clamp(limits.low, limits.high)
    return -weights * terms.advantages * terms.logprobs


def sapo(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Gated -A, f[k], the gate sigmoid(t (r - 1)) 4 / t, t by the sign of A: arXiv 2511.20347."""
    del limits
    positive, negative = settings.sapo.positive, settings.sapo.negative
    is_gain = (terms.advantages > 0).to(terms.advantages.dtype)
    sharpness = negative + (positive - negative) * is_gain
    gate = torch.sigmoid(sharpness * (terms.log_ratio.exp() - 1)) * 4 / sharpness
    return -gate * terms.advantages


def reinforce(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Plain -A log p, f[k]: REINFORCE (Williams, 1992)."""
    del settings, limits
    return -terms.advantages * terms.logprobs


def sft(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Plain -log p, f[k]: the cross-entropy of targets; their weights are those of the mean."""
    del settings, limits
    return -terms.logprobs


Surrogate = Callable[[Terms, Loss, ClipRange], Tensor]

_BUILT_IN: Final[Mapping[str, Surrogate]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "sft": sft,
}


@cache
def surrogate_of(name: str) -> Surrogate:
    """Return a surrogate: f[k], what each token costs, with a gradient through `Terms`.

    Args:
        name: Built in, or `module:function` of the user's.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is no such function here, INVALID_FIELD, at every
            call, when it does not return one number per token.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    own: Surrogate = load(name, what=f"loss.surrogate {name}")

    def checked(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
        costs: Any = own(terms, settings, limits)
        if not isinstance(costs, Tensor) or costs.shape != terms.logprobs.shape:
            what = tuple(costs.shape) if isinstance(costs, Tensor) else type(costs).__name__
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"loss.surrogate {name} returned {what}, not one cost for each of the "
                f"{len(terms.logprobs)} tokens",
            )
        return costs

    return checked
