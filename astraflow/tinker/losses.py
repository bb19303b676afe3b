"""Losses: sums over tokens, without any mean, of log-probabilities and what comes with them.

p is the probability of a token under the weights that are trained, q under those that sampled it,
r = p / q and A its advantage. Where weight or advantage is 0, nothing is added.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from astraflow.core.errors import AstraflowError, Reason
from astraflow.tinker.wire import unserved

Formula = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss.

    Attributes:
        formula: Takes log p, f32[n], and the inputs, f32[n] each; returns the sum.
        inputs: What a datum has beside target_tokens; the first one says where there is a loss.
        settings: Options, with their defaults.
    """

    formula: Formula
    inputs: tuple[str, ...]
    settings: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss with the options of a request."""

    kind: LossKind
    settings: Mapping[str, float]

    def of(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over some tokens; see `LossKind.formula`."""
        return self.kind.formula(logprobs, inputs, self.settings)

    def applies(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return bool[n], where it is not 0 whatever a model says."""
        return inputs[self.kind.inputs[0]] != 0


def find_loss(name: str, settings: Mapping[str, float]) -> TokenLoss:
    """Return a loss by its name.

    Raises:
        AstraflowError: CAPABILITY_MISSING for one that is not here, INVALID_FIELD for options that
            it does not have, or that are not finite.
    """
    kind = LOSSES.get(name)
    if kind is None:
        raise unserved(f"loss_fn {name!r}", f"take one of {', '.join(LOSSES)}")
    for key, value in settings.items():
        if key not in kind.settings or not np.isfinite(value):
            known = ", ".join(kind.settings) or "none"
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"loss_fn_config.{key} = {value}: the finite options of {name} are {known}",
            )
    return TokenLoss(kind=kind, settings={**kind.settings, **settings})


def _cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], _settings: Mapping[str, float]
) -> Tensor:
    """Return the sum of -w log p."""
    return -(inputs["weights"] * logprobs).sum()


def _importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], _settings: Mapping[str, float]
) -> Tensor:
    """Return the sum of -r A: REINFORCE (Williams 1992) of what another policy sampled."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Return the sum of -min(r A, clip(r, low, high) A): arXiv 1707.06347, equation 7."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(ratio * advantages).minimum(clipped * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Return the sum of -clip(r, low, high) A log p, without a gradient of the clipped ratio.

    This is arXiv 2506.13585, equation 4; the bounds are those of r itself.
    """
    ratio = _ratio(logprobs, inputs).detach()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(clipped * inputs["advantages"] * logprobs).sum()


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


_SAMPLED: Final = ("advantages", "logprobs")
LOSSES: Final[Mapping[str, LossKind]] = {
    "cross_entropy": LossKind(formula=_cross_entropy, inputs=("weights",), settings={}),
    "importance_sampling": LossKind(formula=_importance_sampling, inputs=_SAMPLED, settings={}),
    "ppo": LossKind(
        formula=_ppo,
        inputs=_SAMPLED,
        settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": LossKind(
        formula=_cispo,
        inputs=_SAMPLED,
        settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
}
"""By the names of Tinker's API."""
