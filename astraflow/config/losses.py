"""What a step of training minimises: losses, advantages, a critic, and the optimizer."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from astraflow.config.strict import Count, Finite, Options, Strict

Paired = Literal["dpo", "bradley_terry"]

Surrogate = Literal["clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce", "sft"] | Paired

Beta = Annotated[float, Field(ge=0, lt=1)]
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
    """Largest weight; of mask: above it a token is left out."""

    @model_validator(mode="after")
    def _low_is_used(self) -> Self:
        if self.style == "truncate" and self.low:
            raise ValueError("low belongs to style mask; truncate has no lower bound")
        return self


class Kl(Strict):
    """Keeps a policy near a reference, or leads it to one (a teacher of the same vocabulary)."""

    coefficient: Finite = Field(gt=0)
    """What the term, or the penalty, is multiplied by."""
    estimator: Literal["k1", "k2", "k3"] | OwnCode = "k3"
    """With d = log-probability of the policy less that of the reference: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d. module:function: your own, called with both log-probabilities, f[k] each,
    for f[k]."""
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
        if self.where == "token" and self.estimator in ("k2", "k3"):
            raise ValueError("where: token needs estimator k1: the others lead nowhere as a reward")
        return self


class Sapo(Strict):
    """How soft the gate of surrogate sapo is; larger is sharper."""

    positive: Finite = Field(default=1.0, gt=0)
    """Where the advantage is positive."""
    negative: Finite = Field(default=1.05, gt=0)
    """Where it is negative."""


class Pairs(Strict):
    """Losses of pairs: of two rows of a group the one of the higher reward is preferred."""

    beta: Finite = Field(default=0.1, gt=0)
    """Of dpo: what the log-ratio of a row to the reference is multiplied by."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that may be the wrong way round."""
    margin: Finite = Field(default=0.0, ge=0)
    """So much of the difference of two rewards is to lie between the rows; 0: any lead will do."""
    reference: Path | None = None
    """Of dpo: Hugging Face directory; unset: the first weights of the policy."""


class Loss(Strict):
    """What is minimised; the defaults are GRPO with clip-higher and a mean over tokens."""

    surrogate: Surrogate | OwnCode = "clip"
    """clip: PPO's, of the ratio between policy and `old`. cispo: clips the weight, and keeps every
    token's gradient. sapo: a soft gate in place of the clip. dppo_tv, dppo_kl: a token stops where
    the divergence, not the ratio, has grown to clip_low or clip_high. reinforce: no ratio at all.
    sft: supervised fine-tuning, every loss token is a target, whatever came of its row.
    dpo: preferred rows become likelier than others of their group. bradley_terry: the model becomes
    a reward model, which scores them higher.
    module:function: your own, called with `Terms`, these settings and the `ClipRange`."""
    options: Options = Field(default={})
    """Of a surrogate of your own, which finds them in the settings."""
    advantage_scale: Finite = Field(default=1.0, ge=0)
    """Factor on advantages. 0: what a rollout earned is not looked at, as in pure distillation."""
    ratio: Literal["token", "sequence"] = "token"
    """sequence: the geometric mean over a row, for all of its tokens (GSPO)."""
    old: Literal["sampler", "recomputed"] = "sampler"
    """What the ratio compares with: what was sampled from, or the policy before the batch. The
    two differ where data are stale; recomputed clips only what minibatches or epochs have moved."""
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
    pairs: Pairs = Pairs()
    correction: Correction | None = None
    """Unset: none."""
    kl: Kl | None = None
    """Unset: none."""
    entropy_coefficient: Finite = Field(default=0.0, ge=0)
    """Of a bonus for the entropy of the distributions that tokens are drawn from, in nats."""
    router_balance_coefficient: Finite = Field(default=0.0, ge=0)
    """Of mixtures of experts: a loss that is least, 1, where experts are chosen equally often."""
    whiten: bool = False
    """Give the advantages of a batch's tokens mean 0 and deviation 1 (REINFORCE++)."""
    mean: Literal["tokens", "rows", "constant"] = "tokens"
    """tokens: every token of the batch counts the same (DAPO). rows: every row does (GRPO).
    constant: the sum over tokens, by rows times `row_tokens` (Dr. GRPO)."""
    row_tokens: Count | None = Field(default=None, ge=1)
    """Of mean: constant; as many as a row can have."""

    @property
    def moves_every_row(self) -> bool:
        """Whether rows without an advantage have a gradient, too."""
        others = self.entropy_coefficient or self.router_balance_coefficient
        return self.kl is not None or self.surrogate == "sft" or self.is_paired or bool(others)

    @property
    def is_paired(self) -> bool:
        """Whether rows are compared with others of their group."""
        return self.surrogate in ("dpo", "bradley_terry")

    @property
    def makes_reward_model(self) -> bool:
        """Whether the model ends in one number, not in logits."""
        return self.surrogate == "bradley_terry"

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs log-probabilities of a second, frozen model."""
        return self.kl is not None or self.surrogate == "dpo"

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
        if self.is_paired and (self._has_advantages or self.kl or self.entropy_coefficient):
            raise ValueError(
                f"{self.surrogate} compares rows; whiten, advantage_scale, correction, kl and "
                "entropy_coefficient mean nothing to it"
            )
        if self.is_paired and self.mean != "tokens":
            raise ValueError(f"{self.surrogate} is a mean over pairs; leave mean out")
        if self.options and ":" not in self.surrogate:
            raise ValueError("options are those of a surrogate of your own, module:function")
        if self.surrogate != "clip" and (self.dual_clip or self.m2_threshold):
            raise ValueError("dual_clip and m2_threshold belong to surrogate: clip")
        if self.m2_threshold and (self.ratio, self.old) != ("token", "sampler"):
            raise ValueError("m2_threshold looks at the ratio of tokens to their sampler")
        return self


class Overlong(Strict):
    """Takes off the reward of long rollouts, softly (DAPO's overlong reward shaping)."""

    max_tokens: Count = Field(ge=1)
    """Sampled tokens from which on all of `penalty` is taken off."""
    buffer_tokens: Count = Field(ge=1)
    """So many before that it begins, and grows linearly."""
    penalty: Finite = Field(default=1.0, gt=0)
    """The most that is taken off."""

    @model_validator(mode="after")
    def _begins_after_nothing(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens cannot be more than max_tokens")
        return self


class AgentAdvantages(Strict):
    """How the rewards of one agent become advantages."""

    baseline: Literal["group", "leave_one_out", "none"] = "group"
    """What a reward is compared with: the mean of its group (GRPO), that of the others of its group
    (RLOO), or nothing (REINFORCE++, with loss.whiten)."""
    scale_by_std: bool = False
    """Divide by the group's standard deviation (GRPO as published); off: Dr. GRPO."""
    std: Literal["sample", "population"] = "sample"
    """Which deviation that is. sample: over n - 1, as in verl. population: over n."""
    estimator: OwnCode | None = None
    """module:function, in place of baseline and scale_by_std; called with the rewards that are
    compared, f64[n], for their advantages, f64[n]. The hub calls it."""
    overlong: Overlong | None = None
    """Unset: length costs nothing."""


class Advantages(AgentAdvantages):
    """Advantages, stamped by the hub when a group is whole."""

    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Per turn, of rewards that a workflow gives to turns (`reward_turn`); 0: each is its own
    turn's. With a critic they are discounted by its gamma."""
    agents: dict[str, AgentAdvantages] = Field(default={})
    """By the name that a workflow gives its trajectories: what holds for those in place of the keys
    above, such as another baseline for a verifier than for a solver. Of rewards of turns it is the
    baseline alone."""


class Optimizer(Strict):
    """What changes fp32 master weights by clipped gradients."""

    kind: Literal["adamw", "muon"] | OwnCode = "adamw"
    """muon: matrices between embeddings and output layer by torch.optim.Muon, scaled so that the
    learning rate is that of AdamW, and all else by AdamW. module:function: your own, called with
    parameters by name and these settings for a torch.optim.Optimizer."""
    options: Options = Field(default={})
    """Of an optimizer of your own, which finds them in the settings."""
    learning_rate: Finite = Field(default=1e-6, gt=0)
    """After the warm-up, and before the decay."""
    warm_up_steps: Count = Field(default=0, ge=0)
    """Steps over which the rate rises linearly to learning_rate."""
    decay: tuple[int, int] | None = None
    """Last step at learning_rate, and the step from which on the rate is a tenth of it; it falls
    linearly between them. Unset: it does not fall."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW: decay of the first and of the second moment."""
    eps: Finite = Field(default=1e-8, gt=0)
    """Of AdamW: added to the root of the second moment."""
    weight_decay: Finite = Field(default=0.0, ge=0)
    """Decoupled from the gradient, as in AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger norm are scaled down to it."""

    @model_validator(mode="after")
    def _decay_goes_on(self) -> Self:
        if self.decay is not None and not self.warm_up_steps <= self.decay[0] < self.decay[1]:
            raise ValueError("decay needs two steps, the first not before warm_up_steps ends")
        if self.options and ":" not in self.kind:
            raise ValueError("options are those of an optimizer of your own, module:function")
        return self


class CriticConfig(Strict):
    """PPO's critic: a second model of the policy's size that says what a state is worth.

    Advantages are estimated from its values (GAE), not compared within groups.
    """

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Of GAE; below 1 the critic's values count for more: less noise, more bias."""
    clip: float = Field(default=0.5, gt=0)
    """A value moves no further in one step."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-5)
