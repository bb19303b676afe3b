"""The auxiliary loss of mixtures of experts: least where a layer's experts are chosen alike."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.routers import Mixture, MixtureWatch, mixtures_of
from astraflow.trainers.tensors import to_tensor


def imbalance(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return E sum_e f_e P_e of one layer: Switch Transformers (arXiv 2101.03961, eq. 4).

    f_e is the share of choices that expert e got, P_e its mean probability. 1 where both are even.

    Args:
        scores: f[n, E], of the experts: probabilities, shares that make none (such as sigmoids), or
            logits.
        chosen: i64[n, k], the experts that each token took.
    """
    count, found = scores.shape[1], scores.float()
    sums = found.sum(-1, keepdim=True)
    is_share = bool(((found >= 0) & (found <= 1) & (sums > 0)).all())
    likely = found / sums if is_share else found.softmax(-1)
    shares = torch.bincount(chosen.flatten(), minlength=count) / chosen.numel()
    return count * (shares * likely.mean(0)).sum()


class _ScoredTap(MixtureWatch):
    """Keeps what one layer chose and of which scores, while its owner records.

    Attributes:
        choices: Scores f[n, E] and experts i64[n, k]; one of each in a pass, as far as is known.
    """

    def __init__(self, owner: "RouterBalance", mixture: Mixture) -> None:
        super().__init__(mixture)
        self.choices: list[tuple[Tensor, Tensor]] = []
        self._owner = owner

    def is_needed(self) -> bool:
        return self._owner.is_recording

    def chosen(self, scores: Tensor, result: Any) -> Any:
        self.choices.append((scores, result[1]))
        return result


class RouterBalance:
    """Adds the imbalance of a model's routers to the loss of each pass.

    Attributes:
        is_on: Whether the recipe has such a loss.
        is_recording: Whether what routers pick is kept.
    """

    def __init__(self, module: nn.Module, coefficient: float) -> None:
        """Watch the routers of a model, if there is such a loss.

        Raises:
            AstraflowError: INVALID_FIELD when the model has no routers.
        """
        self.is_on, self.is_recording = coefficient > 0, False
        self._coefficient = coefficient
        self._name = type(module).__name__
        mixtures = mixtures_of(module) if self.is_on else ()
        self._taps = [_ScoredTap(self, each) for each in mixtures]
        if self.is_on and not mixtures:
            raise self._unknown("has no experts")
        if self.is_on:
            # Also of a pass that asks the model what it can, in the middle of a recording.
            module.register_forward_pre_hook(self._forget)

    def _forget(self, *_: object) -> None:
        for each in self._taps:
            each.choices.clear()

    def _unknown(self, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.INVALID_FIELD,
            f"loss.router_balance_coefficient: {self._name} {why}; leave it out",
        )

    @contextmanager
    def recording(self) -> Generator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def loss(self, slots: Any, *, share: float) -> tuple[Tensor, float]:
        """Return the loss of the pass, a scalar with a gradient, and the imbalance in it.

        Args:
            slots: i64[t], which tokens of the pass are no padding.
            share: Of the pass in the update; the imbalance is a mean over passes and layers.

        Raises:
            AstraflowError: INVALID_FIELD for a model that chooses in a way that is not known.
        """
        if not share:
            return torch.zeros(()), 0.0
        layers: list[Tensor] = []
        for each in self._taps:
            if len(each.choices) != 1 or not each.choices[0][0].requires_grad:
                raise self._unknown("chooses its experts in a way that is not known")
            scores, picked = each.choices.pop()
            at = to_tensor(slots, scores.device)
            layers.append(imbalance(scores[at], picked[at]))
        found = share * torch.stack(layers).mean()
        return self._coefficient * found, float(found.detach())
