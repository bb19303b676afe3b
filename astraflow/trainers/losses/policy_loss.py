"""The loss of one pass: surrogate, correction and KL term, put together as the recipe says."""

from typing import Final

from torch import Tensor

from astraflow.config.recipe import Loss
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.losses.clip_range import ClipRange
from astraflow.trainers.losses.corrections import correction_of
from astraflow.trainers.losses.divergence import divergence
from astraflow.trainers.losses.inputs import LossInputs, log_ratio
from astraflow.trainers.losses.surrogates import Terms, surrogate_of

_NO_REFERENCE: Final = "a KL term needs the log-probabilities of its reference"


def policy_loss(inputs: LossInputs, settings: Loss, limits: ClipRange, *, divisor: float) -> Tensor:
    """Return one pass's share of the batch's loss; the shares of all passes add up.

    loss = 1/divisor sum_t w_t (c_t surrogate_t + beta KL_t): w_t the weights of the mean, c_t the
    correction. With the default settings that is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3)
    with clip-higher and a mean over the tokens of the batch (DAPO, arXiv 2503.14476, eq. 8).

    Args:
        inputs: The tokens of the pass.
        settings: Of the recipe.
        limits: Where ratios are clipped.
        divisor: Of the mean, for the whole batch.

    Returns:
        Scalar.
    """
    costs = _surrogate(inputs, settings, limits)
    if settings.correction is not None:
        costs = costs * correction_of(inputs, settings.correction)
    if settings.kl is not None and settings.kl.where == "loss":
        estimate = divergence(inputs.logprobs, _reference(inputs), settings.kl.estimator)
        costs = costs + settings.kl.coefficient * estimate
    return (costs * inputs.weights).sum() / divisor


def _surrogate(inputs: LossInputs, settings: Loss, limits: ClipRange) -> Tensor:
    is_recomputed = settings.old == "recomputed"
    old = inputs.logprobs.detach() if is_recomputed else inputs.sampler_logprobs
    ratio, advantages = log_ratio(inputs.logprobs, old), _advantages(inputs, settings)
    if settings.ratio == "sequence":
        # GSPO (arXiv 2507.18071).
        ratio, advantages = inputs.row_means(ratio), inputs.row_means(advantages)
    terms = Terms(log_ratio=ratio, logprobs=inputs.logprobs, advantages=advantages)
    return surrogate_of(settings.surrogate)(terms, settings, limits)


def _advantages(inputs: LossInputs, settings: Loss) -> Tensor:
    """Return f[k]; with a KL in the reward less what is still to be paid.

    That is the return of a per-token reward -beta KL_t: over the rest of the row with a discount of
    1 (InstructGPT, arXiv 2203.02155, section 3.5), of the token alone with a discount of 0. The
    latter is on-policy distillation where the reference is a teacher (GKD, arXiv 2306.13649): the
    gradient is on average that of KL(policy, teacher) at the states that the policy visits.
    """
    kl, earned = settings.kl, inputs.advantages
    if settings.advantage_scale != 1:
        earned = settings.advantage_scale * earned
    if kl is None or kl.where == "loss":
        return earned
    spent = divergence(inputs.sampler_logprobs, _reference(inputs), kl.estimator)
    return earned - kl.coefficient * (inputs.rest_sums(spent) if kl.where == "reward" else spent)


def _reference(inputs: LossInputs) -> Tensor:
    if inputs.reference_logprobs is None:
        raise AstraflowError(Reason.INTERNAL, _NO_REFERENCE)
    return inputs.reference_logprobs
