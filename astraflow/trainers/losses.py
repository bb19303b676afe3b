"""Losses: what each pass adds to the gradient of a batch, and what the log says of it.

A surrogate says what a token costs; corrections, a KL term and the mean of the recipe make the
loss of a pass of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, sqrt
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from astraflow.config.recipe import Correction, Loss
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.engine import guarded
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import LossTokens
from astraflow.trainers.tensors import to_tensor

__all__ = [
    "ClipRange",
    "LossInputs",
    "Terms",
    "clip_range_of",
    "divisor_of",
    "loss_metrics",
    "policy_loss",
    "prepared",
    "surrogate_of",
    "try_own_code",
]

# exp(20) is 5e8: a ratio that large is noise; beyond 88 single precision has none.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The k loss tokens of one pass, whole rows one after another.

    Attributes:
        logprobs: f[k], under the weights that are trained, with a gradient.
        sampler_logprobs: f[k], under what the tokens were sampled from.
        advantages: f[k].
        weights: f[k], factor of each token in the mean.
        rows: i64[k], in which row of the pass each stands, from 0.
        old_logprobs: f[k], under the policy before the batch; None: it is the one that is trained.
        reference_logprobs: f[k], under the reference of a KL term; None: there is none.
        entropies: f[k], nats, with a gradient; None: the loss has no bonus for them.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    rows: Tensor
    row_count: int
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None

    @property
    def before(self) -> Tensor:
        """f[k], under the policy before the batch, without a gradient."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def old(self, settings: Loss) -> Tensor:
        """Return f[k], under what ratios compare with."""
        return self.before if settings.old == "recomputed" else self.sampler_logprobs

    def row_sums(self, values: Tensor) -> Tensor:
        """Return f[k], for each token the sum over its row."""
        sums = values.new_zeros(self.row_count).index_add(0, self.rows, values)
        return sums[self.rows]

    def row_means(self, values: Tensor) -> Tensor:
        """Return f[k], for each token the mean over its row."""
        return self.row_sums(values) / self.row_sums(torch.ones_like(values))


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return log(p / q), f[k], within what single precision can raise e to."""
    return (logprobs - others).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


# What M2PO clips at where nothing has to be (the published defaults).
_WIDEST_LOW: Final = 0.95

_WIDEST_HIGH: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The ratios between which a token's gradient is kept."""

    low: float
    high: float


def clip_range_of(
    settings: Loss, log_ratios: np.ndarray | None = None, advantages: np.ndarray | None = None
) -> ClipRange:
    """Return the range for a batch.

    Args:
        settings: Of the recipe.
        log_ratios: f[K], of all tokens of the batch; with `m2_threshold` only.
        advantages: f[K], theirs.
    """
    threshold = settings.m2_threshold
    if threshold is None or log_ratios is None or advantages is None:
        return ClipRange(low=1 - settings.clip_low, high=1 + settings.clip_high)
    return _second_moment_range(log_ratios, advantages, threshold)


def _second_moment_range(
    log_ratios: np.ndarray, advantages: np.ndarray, threshold: float
) -> ClipRange:
    """Return the widest range that keeps the second moment of what it does not clip below a bound.

    M2PO (arXiv 2510.01161): only tokens whose clip would bind count, those with A > 0, r > 1 or
    A < 0, r < 1. Of their squared log-ratios the largest go until the mean of the rest is below the
    threshold; the root of the largest that stays bounds the log-ratio on both sides.
    """
    binds = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    squares = np.sort(np.square(log_ratios[binds], dtype=np.float64))
    means = squares.cumsum() / np.arange(1, len(squares) + 1)
    kept = squares[means < threshold]
    if len(kept) == len(squares):
        return ClipRange(low=1 - _WIDEST_LOW, high=1 + _WIDEST_HIGH)
    bound = sqrt(kept[-1]) if len(kept) else 0.0
    return ClipRange(
        low=max(exp(-bound), 1 - _WIDEST_LOW), high=min(exp(min(bound, 10.0)), 1 + _WIDEST_HIGH)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What surrogates are made of: the k loss tokens of a pass, whole rows one after another.

    Attributes:
        log_ratio: f[k], log r, of the policy to the old one; with `ratio: sequence` the mean of the
            row. It has a gradient.
        logprobs: f[k], log p of the policy, with a gradient.
        advantages: f[k], A.
        inputs: The pass: old and sampler's log-probabilities f[k], rows i64[k], sums over rows.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    inputs: LossInputs


def clip(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Negated minimum of r A and c A, f[k], c the clipped ratio: PPO (arXiv 1707.06347, eq. 7).

    With a dual clip d no gain is less than d A where A < 0 (arXiv 1912.09729).
    """
    ratio, advantages = terms.log_ratio.exp(), terms.advantages
    gain, clipped = ratio * advantages, ratio.detach().clamp(limits.low, limits.high) * advantages
    # Not torch's minimum, whose gradient where both are alike is not the same in all its releases:
    # M2PO clips at the ratio of a token.
    gain = torch.where(clipped < gain, clipped, gain)
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


def dppo_tv(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Masked -r A, f[k], the mask by p - q, binary total variation: DPPO (arXiv 2602.04879).

    A token of A > 0 stops where p - q exceeds clip_high, one of A < 0 where q - p exceeds clip_low.
    """
    return _trusted(terms, _grown_tv(terms.logprobs, terms.inputs.old(settings)), limits)


def dppo_kl(terms: Terms, settings: Loss, limits: ClipRange) -> Tensor:
    """Masked -r A, f[k], the mask by the KL of q from p at "this token or another": DPPO."""
    return _trusted(terms, _grown_kl(terms.logprobs, terms.inputs.old(settings)), limits)


def _grown_tv(logprobs: Tensor, old: Tensor) -> Tensor:
    return logprobs.exp() - old.exp()


def _grown_kl(logprobs: Tensor, old: Tensor) -> Tensor:
    edge = 1e-6
    p, q = (each.exp().clamp(edge, 1 - edge) for each in (logprobs, old))
    kl = q * (q.log() - p.log()) + (1 - q) * ((1 - q).log() - (1 - p).log())
    return kl * (p - q).sign()


# By which a surrogate stops tokens, f[k] of the log-probabilities of policy and old one, f[k] each;
# others clip the ratio.
_GROWN: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "dppo_tv": _grown_tv,
    "dppo_kl": _grown_kl,
}


def _trusted(terms: Terms, grown: Tensor, limits: ClipRange) -> Tensor:
    """Return -r A, 0 where a token has `grown`, f[k], out of the range to the side of its A."""
    grown = grown.detach()
    is_high = (terms.advantages > 0) & (grown > limits.high - 1)
    is_low = (terms.advantages < 0) & (-grown > 1 - limits.low)
    costs = -terms.log_ratio.exp() * terms.advantages
    return torch.where(is_high | is_low, 0.0, costs)


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
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
    "sft": sft,
    # Of pairs: A is what `pairs` makes of the numbers of rows, log p what that is a sum of.
    "dpo": reinforce,
    "bradley_terry": reinforce,
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
        what = f"loss.surrogate {name}"
        costs = guarded(lambda: own(terms, settings, limits), what)
        return _one_per_token(costs, terms.logprobs, f"{what} returned", "cost")

    return checked


def _one_per_token(found: Any, logprobs: Tensor, what: str, kind: str) -> Tensor:
    """Return what code of a user made, which has to be f[k]."""
    if isinstance(found, Tensor) and found.shape == logprobs.shape:
        return found
    had = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise AstraflowError(
        Reason.INVALID_FIELD,
        f"{what} {had}, not one {kind} for each of the {len(logprobs)} tokens",
    )


def try_own_code(settings: Loss) -> None:
    """Compute a loss of five tokens in two rows, if any of it is code of the user's.

    Raises:
        AstraflowError: CODE_UNKNOWN when it is not here; INVALID_FIELD when it raises, returns no
            number per token, or has no gradient.
    """
    kl = settings.kl
    if ":" not in settings.surrogate and (kl is None or ":" not in kl.estimator):
        return
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], requires_grad=True)
    apart = torch.tensor([0.1, 0.0, -0.3, 0.05, 0.4])
    inputs = LossInputs(
        logprobs=logprobs,
        sampler_logprobs=logprobs.detach() - apart,
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]),
        weights=torch.ones(5),
        rows=torch.tensor([0, 0, 0, 1, 1]),
        row_count=2,
        old_logprobs=logprobs.detach() + apart,
        reference_logprobs=logprobs.detach() - 2 * apart,
    )
    limits = ClipRange(low=1 - settings.clip_low, high=1 + settings.clip_high)
    loss = policy_loss(inputs, settings, limits, divisor=5.0)
    if kl is not None:
        divergence(inputs.sampler_logprobs, logprobs.detach() - 2 * apart, kl.estimator)
    if not loss.requires_grad:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"loss.surrogate {settings.surrogate}: nothing of its costs has a gradient; make them "
            "of terms.logprobs or terms.log_ratio, without .detach() or .item()",
        )


def correction_of(inputs: LossInputs, settings: Correction) -> Tensor:
    """Return f[k], weights without a gradient.

    w = exp(old - sampler), old the policy before the batch: decoupled PPO (arXiv 2110.00641).
    Truncated: min(w, high), TIS (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025). Masked: w where it lies within low to high, else 0.
    """
    gap = log_ratio(inputs.before, inputs.sampler_logprobs)
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


def divergence(logprobs: Tensor, reference_logprobs: Tensor | None, estimator: str) -> Tensor:
    """Return f[k], estimates of KL(policy, reference) at tokens that the policy drew.

    With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    Raises:
        ValueError: There is no reference.
        AstraflowError: As `surrogate_of` and its result raise, for an estimator of the user's.
    """
    if reference_logprobs is None:
        raise ValueError("a KL term needs the log-probabilities of its reference")
    gap = log_ratio(logprobs, reference_logprobs)
    match estimator:
        case "k1":
            return gap
        case "k2":
            return gap.square() / 2
        case "k3":
            return (-gap).exp() - 1 + gap
        case _:
            what = f"loss.kl.estimator {estimator}"
            own: Any = load(estimator, what=what)
            found = guarded(lambda: own(logprobs, reference_logprobs), what)
            return _one_per_token(found, logprobs, f"{what} returned", "estimate")


def policy_loss(inputs: LossInputs, settings: Loss, limits: ClipRange, *, divisor: float) -> Tensor:
    """Return one pass's share of the batch's loss, a scalar; the shares of all passes add up.

    loss = 1/divisor sum_t w_t (c_t surrogate_t + beta KL_t - eta H_t): the divisor is that of the
    whole batch, w_t the weights of the mean, c_t the correction, H_t the entropy. With the default
    settings that is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with clip-higher and a mean over
    the tokens of the batch (DAPO, arXiv 2503.14476, eq. 8).

    Returns:
        Scalar.
    """
    costs = _surrogate(inputs, settings, limits)
    if settings.correction is not None:
        costs = costs * correction_of(inputs, settings.correction)
    if settings.kl is not None and settings.kl.where == "loss":
        estimator = settings.kl.estimator
        estimate = divergence(inputs.logprobs, inputs.reference_logprobs, estimator)
        costs = costs + settings.kl.coefficient * estimate
    if inputs.entropies is not None:
        costs = costs - settings.entropy_coefficient * inputs.entropies
    return (costs * inputs.weights).sum() / divisor


def _surrogate(inputs: LossInputs, settings: Loss, limits: ClipRange) -> Tensor:
    ratio, advantages = log_ratio(inputs.logprobs, inputs.old(settings)), inputs.advantages
    if settings.ratio == "sequence":
        # GSPO (arXiv 2507.18071).
        ratio, advantages = inputs.row_means(ratio), inputs.row_means(advantages)
    terms = Terms(log_ratio=ratio, logprobs=inputs.logprobs, advantages=advantages, inputs=inputs)
    return surrogate_of(settings.surrogate)(terms, settings, limits)


def _less_kl(
    tokens: LossTokens, settings: Loss, reference_logprobs: np.ndarray | None
) -> np.ndarray:
    """Return f[K], scaled advantages, with a KL in the reward less what is still to be paid.

    That is the return of a per-token reward -beta KL_t: over the rest of the row with a discount of
    1 (InstructGPT, arXiv 2203.02155, section 3.5), of the token alone with a discount of 0. The
    latter is on-policy distillation where the reference is a teacher (GKD, arXiv 2306.13649): the
    gradient is on average that of KL(policy, teacher) at the states that the policy visits.
    """
    kl, earned = settings.kl, tokens.advantages
    if settings.advantage_scale != 1:
        earned = settings.advantage_scale * earned
    if kl is None or kl.where == "loss":
        return earned
    reference = None if reference_logprobs is None else to_tensor(reference_logprobs)
    sampler = to_tensor(tokens.sampler_logprobs)
    spent = divergence(sampler, reference, kl.estimator).double().numpy()
    owed = _rest_sums(spent, tokens.rows) if kl.where == "reward" else spent
    return (earned - kl.coefficient * owed).astype(earned.dtype)


def _rest_sums(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return f64[K], for each token the sum over itself and what follows it in its row, i64[K]."""
    ends = np.bincount(rows, weights=values).cumsum() if len(rows) else values
    return ends[rows] - values.cumsum() + values


_EPSILON: Final = 1e-6


def divisor_of(settings: Loss, *, row_count: float, token_count: float) -> float:
    """Return what the sum over the tokens of an update is divided by.

    Args:
        settings: Of the recipe.
        row_count: Rows of all ranks, those that move nothing included.
        token_count: Their loss tokens.
    """
    match settings.mean:
        case "tokens":
            return token_count
        case "rows":
            return row_count
        case "constant":
            return row_count * (settings.row_tokens or 1)


def prepared(
    tokens: LossTokens,
    settings: Loss,
    peers: Peers = ALONE,
    *,
    reference_logprobs: np.ndarray | None = None,
) -> LossTokens:
    """Return the tokens of a batch with the weights and advantages that the recipe asks for.

    Advantages are scaled, lose the KL that is in the reward, and are whitened, in that order.

    Args:
        tokens: Of this rank's rows.
        settings: Of the recipe.
        peers: The ranks that have the others; whitening counts the tokens of all.
        reference_logprobs: f32[K], under the reference of a KL term.
    """
    tokens = replace(tokens, advantages=_less_kl(tokens, settings, reference_logprobs))
    if settings.whiten:
        tokens = replace(tokens, advantages=_whitened(tokens.advantages, tokens.weights, peers))
    if settings.mean == "rows":
        lengths = np.bincount(tokens.rows)[tokens.rows]
        tokens = replace(tokens, weights=(tokens.weights / lengths).astype(tokens.weights.dtype))
    return tokens


def _whitened(advantages: np.ndarray, weights: np.ndarray, peers: Peers) -> np.ndarray:
    """Return f[K] with mean 0 and deviation 1 over the tokens that count.

    REINFORCE++ (arXiv 2501.03262).
    """
    counted = peers.all_gather(advantages[weights != 0].astype(np.float64))
    if not len(counted):
        return advantages
    return ((advantages - counted.mean()) / (counted.std() + _EPSILON)).astype(advantages.dtype)


def loss_metrics(
    loss: LossTokens,
    *,
    logprobs: np.ndarray,
    entropies: np.ndarray,
    settings: Loss,
    limits: ClipRange,
    old_logprobs: np.ndarray | None = None,
) -> Mapping[str, float]:
    """Return numbers for the log.

    The KL estimate is k3 (http://joschu.net/blog/kl-approx.html) of the sampler's distribution
    from that of the policy before the batch: mean of w - 1 - log w over tokens that the sampler
    drew. Of stored answers nobody knows how a sampler drew them: the mismatch is left out.

    Args:
        loss: The K tokens.
        logprobs: f32[K], under the weights that are trained.
        entropies: f32[K], of the distributions that the tokens come from.
        settings: Of the recipe.
        limits: Where ratios are clipped.
        old_logprobs: f32[K], under the policy before the batch; None: `logprobs` are those.
    """
    if not len(loss):
        return {}
    trained = logprobs.astype(np.float64)
    before = trained if old_logprobs is None else old_logprobs.astype(np.float64)
    gap = before - loss.sampler_logprobs
    old = before if settings.old == "recomputed" else loss.sampler_logprobs
    log_ratios, advantages, weight = trained - old, loss.advantages, _raised(gap)
    if settings.ratio == "sequence":
        log_ratios, advantages = _row_means(log_ratios, loss), _row_means(advantages, loss)
    moved = ratio = _raised(log_ratios)
    if settings.surrogate in _GROWN:
        grown = _GROWN[settings.surrogate](to_tensor(trained), to_tensor(old))
        moved = 1 + grown.numpy()
    # Out of the range on the side of the advantage.
    is_high = (advantages > 0) & (moved > limits.high)
    is_low = (advantages < 0) & (moved < limits.low)
    found = {
        "train/entropy": float(entropies.mean(dtype=np.float64)),
        "train/clip_frac": float((is_high | is_low).mean()),
        "train/ratio_mean": float(ratio.mean()),
        "train/ratio_max": float(ratio.max()),
    }
    if loss.sampler_logprobs.any():
        found |= {
            "mismatch/logp_abs_mean": float(np.abs(gap).mean()),
            "mismatch/logp_abs_max": float(np.abs(gap).max()),
            "mismatch/kl": float((weight - 1 - gap).mean()),
        }
    if settings.m2_threshold is not None:
        found |= {"train/m2": float(np.square(gap).mean()), "train/clip_high": limits.high - 1}
        found["train/clip_low"] = 1 - limits.low
    return found


def _row_means(values: np.ndarray, loss: LossTokens) -> np.ndarray:
    """Return f64[K], for each token the mean over its row, in the update that it is of."""
    begins = (np.diff(loss.rows, prepend=-1) != 0) | (np.diff(loss.positions, prepend=-1) <= 0)
    row = begins.cumsum() - 1
    return (np.bincount(row, weights=values) / np.bincount(row))[row]


def _raised(log_ratios: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratios, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
