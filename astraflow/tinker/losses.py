"""Batches, sequences end to end, and losses: sums over tokens, without any mean.

p is the probability of a token under the weights that are trained, q under those that sampled it,
r = p / q and A its advantage. Where weight or advantage is 0, nothing is added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from torch import Tensor

from astraflow.core.errors import AstraflowError, Reason
from astraflow.tinker.wire import Datum, unserved
from astraflow.trainers.likelihood import PassTokens
from astraflow.trainers.rows import LossTokens, TrainRows

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


def find_loss(name: str, settings: Mapping[str, float]) -> LossKind:
    """Return a loss by its name, with the options of a request.

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
    return replace(kind, settings={**kind.settings, **settings})


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Datums end to end: P tokens, each of which predicts one target or several, C in all.

    Attributes:
        rows: What goes through the model; the loss applies to all but the first token of each.
        targets: i64[C], what is scored after each token.
        inputs: Of the loss, by name, f32[C].
        widths: i64[P], targets of each token.
        shapes: Of each datum's targets.
    """

    rows: TrainRows
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]
    widths: np.ndarray
    shapes: Sequence[tuple[int, ...]]

    @classmethod
    def of(
        cls,
        data: Sequence[Datum],
        names: Sequence[str],
        *,
        vocab_size: int,
        max_context: int,
    ) -> "Batch":
        """Join datums; `names` are of the inputs that the loss needs.

        Raises:
            AstraflowError: INVALID_FIELD, CONTEXT_TOO_LONG.
        """
        for index, datum in enumerate(data):
            _require_sound(datum, names, f"data[{index}]", vocab_size, max_context)
        targets = [datum.inputs["target_tokens"] for datum in data]
        lengths = [len(datum.tokens) for datum in data]
        return cls(
            rows=_rows([datum.tokens for datum in data]),
            targets=np.concatenate([each.ravel() for each in targets]),
            inputs={
                name: np.concatenate([datum.inputs[name].ravel() for datum in data]).astype(
                    np.float32
                )
                for name in names
            },
            widths=np.repeat([each[0].size for each in targets], lengths),
            shapes=[each.shape for each in targets],
        )

    def cells_of(self, one: PassTokens) -> np.ndarray:
        """Return i64[n], which of the C targets the tokens of a pass predict, in their order."""
        widths = self.widths[one.loss_indices]
        firsts = (np.cumsum(self.widths) - self.widths)[one.loss_indices]
        within = np.arange(int(widths.sum())) - np.repeat(np.cumsum(widths) - widths, widths)
        return (np.repeat(firsts, widths) + within).astype(np.int64)

    def targeted(self, one: PassTokens, cells: np.ndarray) -> PassTokens:
        """Return a pass that scores these targets."""
        chosen = np.repeat(one.chosen, self.widths[one.loss_indices])
        return replace(one, chosen=chosen, targets=self.targets[cells], loss_indices=cells)

    def divided(self, found: np.ndarray) -> list[np.ndarray]:
        """Return what was found of the C targets, f32[C], datum by datum."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = np.split(found, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _require_sound(
    datum: Datum, names: Sequence[str], at: str, vocab_size: int, max_context: int
) -> None:
    """Refuse a datum that a loss cannot be computed of."""
    known = ("target_tokens", *names)
    if set(datum.inputs) != set(known):
        raise _invalid(
            f"{at}.loss_fn_inputs has {', '.join(sorted(datum.inputs)) or 'nothing'}: this loss "
            f"takes {', '.join(known)}"
        )
    if len(datum.tokens) > max_context:
        raise AstraflowError(
            Reason.CONTEXT_TOO_LONG, f"{at} has {len(datum.tokens)} tokens, of {max_context}"
        )
    targets = datum.inputs["target_tokens"]
    if targets.dtype != np.int64 or not targets.size:
        raise _invalid(f"{at}.target_tokens has no integers")
    require_known(datum.tokens, vocab_size, f"{at}.model_input")
    require_known(targets, vocab_size, f"{at}.target_tokens")
    for name in names:
        each = datum.inputs[name]
        if each.shape != targets.shape or not np.isfinite(each).all():
            raise _invalid(
                f"{at}.{name} has shape {list(each.shape)}: give finite numbers in the shape of "
                f"target_tokens, {list(targets.shape)}"
            )


def _rows(sequences: Sequence[np.ndarray]) -> TrainRows:
    """Return rows for a model; behind the last token of each, which predicts too, is one more."""
    offsets = np.cumsum([0, *(len(each) + 1 for each in sequences)]).astype(np.int64)
    tokens = np.concatenate([part for each in sequences for part in (each, each[-1:])])
    is_first = np.zeros(len(tokens), np.bool_)
    is_first[offsets[:-1]] = True
    positions = np.flatnonzero(~is_first)
    nothing = np.zeros(len(positions), np.float32)
    row_nothing = np.zeros(len(sequences), np.int64)
    return TrainRows(
        tokens=tokens.astype(np.int32),
        offsets=offsets,
        loss=LossTokens(
            positions=positions,
            rows=np.repeat(np.arange(len(sequences)), np.diff(offsets) - 1),
            sampler_logprobs=nothing,
            advantages=nothing,
            weights=nothing,
            temperatures=nothing + 1,
        ),
        rewards=row_nothing.astype(np.float32),
        min_versions=row_nothing,
        max_versions=row_nothing,
    )


def require_known(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Refuse tokens that a model does not know."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(wrong):
        raise _invalid(f"{name} has token {int(wrong[0])}: the model knows 0 to {vocab_size - 1}")


def _invalid(message: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, message)
