"""Estimators of a KL divergence from samples (http://joschu.net/blog/kl-approx.html)."""

from typing import Literal

from torch import Tensor

from astraflow.trainers.losses.inputs import log_ratio


def divergence(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Return f[k], estimates of KL(policy, reference) at tokens that the policy drew.

    With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    """
    gap = log_ratio(logprobs, reference_logprobs)
    match estimator:
        case "k1":
            return gap
        case "k2":
            return gap.square() / 2
        case "k3":
            return (-gap).exp() - 1 + gap
