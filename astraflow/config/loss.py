"""The loss of a recipe: which surrogate, against what, corrected how, averaged over what."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from astraflow.config.strict import Strict

Surrogate = Literal["clip", "cispo", "sapo", "reinforce", "sft"]
OwnCode = Annotated[str, Field(pattern=r"^[^:]+:[^:]+$")]


class Correction(Strict):
    """Weights tokens by how likely the trainer finds what the sampler drew; needs old: recomputed.

    The weight is exp(old - sampler), and has no gradient.
    """

    style: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above `high` count as `high`. mask: tokens whose weight is outside low to
    high are left out."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: a weight per token. sequence: the product over its row. geometric: its geometric mean
    over the row."""
    low: float = Field(default=0.0, ge=0, le=1)
    """Of mask."""
    high: float = Field(default=2.0, ge=1)

    @model_validator(mode="after")
    def _low_is_used(self) -> Self:
        if self.style == "truncate" and self.low:
            raise ValueError("low belongs to style mask; truncate has no lower bound")
        return self


class Kl(Strict):
    """Keeps a policy near a reference, or leads it to one (a teacher of the same vocabulary)."""

    coefficient: float = Field(gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log-probability of the policy less that of the reference: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d."""
    where: Literal["loss", "reward", "token"] = "loss"
    """loss: a term of its own, of the policy that is trained. reward: taken off the advantage of a
    token, summed over the rest of its row, of the policy that sampled. token: the same of this
    token alone, on-policy distillation."""
    reference: Path | None = None
    """Hugging Face directory; unset: the first weights of the policy."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Self:
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("the gradient of k1 is 0 on average; take k2 or k3, or where: reward")
        if self.where == "token" and self.estimator != "k1":
            raise ValueError("where: token needs estimator k1: the others lead nowhere as a reward")
        return self


class Sapo(Strict):
    """How soft the gate of surrogate sapo is; larger is sharper."""

    positive: float = Field(default=1.0, gt=0)
    """Where the advantage is positive."""
    negative: float = Field(default=1.05, gt=0)
    """Where it is negative."""


class Loss(Strict):
    """What is minimised; the defaults are GRPO with clip-higher and a mean over tokens."""

    surrogate: Surrogate | OwnCode = "clip"
    """clip: PPO's, of the ratio between policy and `old`. cispo: clips the weight, and keeps every
    token's gradient. sapo: a soft gate in place of the clip. reinforce: no ratio at all. sft:
    supervised fine-tuning, every loss token is a target, whatever came of its row. module:function:
    your own, called with `Terms`, these settings and the `ClipRange`."""
    advantage_scale: float = Field(default=1.0, ge=0)
    """Factor on advantages. 0: what a rollout earned is not looked at, as in pure distillation."""
    ratio: Literal["token", "sequence"] = "token"
    """sequence: the geometric mean over a row, for all of its tokens (GSPO)."""
    old: Literal["sampler", "recomputed"] = "sampler"
    """What the ratio compares with: what was sampled from, or the policy before the step."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is not rewarded below 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is not rewarded above 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """A token of negative advantage costs at most so many times the advantage."""
    m2_threshold: float | None = Field(default=None, gt=0)
    """M2PO: clip_low and clip_high are found anew for every batch, so that the second moment of the
    log-ratio of what is not clipped stays below it; 0.04 is common."""
    sapo: Sapo = Sapo()
    correction: Correction | None = None
    """Unset: none."""
    kl: Kl | None = None
    """Unset: none."""
    whiten: bool = False
    """Give the advantages of a batch's tokens mean 0 and deviation 1 (REINFORCE++)."""
    mean: Literal["tokens", "rows", "constant"] = "tokens"
    """tokens: every token of the batch counts the same (DAPO). rows: every row does (GRPO).
    constant: the sum over tokens, by rows times `row_tokens` (Dr. GRPO)."""
    row_tokens: int | None = Field(default=None, ge=1)
    """Of mean: constant; as many as a row can have."""

    @property
    def moves_every_row(self) -> bool:
        """Whether rows without an advantage have a gradient, too."""
        return self.kl is not None or self.surrogate == "sft"

    @property
    def _has_advantages(self) -> bool:
        is_kl = self.kl is not None and self.kl.where != "loss"
        is_scaled = self.advantage_scale != 1
        return self.whiten or is_scaled or is_kl or self.correction is not None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.mean == "constant") != (self.row_tokens is not None):
            raise ValueError("row_tokens is what mean: constant divides by; give both or neither")
        if self.correction is not None and self.old != "recomputed":
            raise ValueError("correction needs old: recomputed; the ratio corrects otherwise")
        if self.surrogate == "sft" and self._has_advantages:
            raise ValueError(
                "sft knows no advantages; whiten, advantage_scale, correction and "
                "kl.where other than loss mean nothing to it"
            )
        if self.surrogate != "clip" and (self.dual_clip or self.m2_threshold):
            raise ValueError("dual_clip and m2_threshold belong to surrogate: clip")
        if self.m2_threshold and (self.ratio, self.old) != ("token", "sampler"):
            raise ValueError("m2_threshold looks at the ratio of tokens to their sampler")
        return self
