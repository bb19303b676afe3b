"""The auxiliary loss of mixtures of experts: least where a layer's experts are chosen alike."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.routers import ChoiceTap, mixtures_of
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


class RouterBalance:
    """Adds the imbalance of a model's routers to the loss of each pass.

    Attributes:
        is_on: Whether the recipe has such a loss.
    """

    def __init__(self, module: nn.Module, coefficient: float) -> None:
        """Watch the routers of a model, if there is such a loss.

        Raises:
            AstraflowError: INVALID_FIELD when the model has no routers.
        """
        self.is_on = coefficient > 0
        self._coefficient = coefficient
        self._name = type(module).__name__
        mixtures = mixtures_of(module) if self.is_on else ()
        self._taps = [ChoiceTap(each, is_on=False) for each in mixtures]
        if self.is_on and not mixtures:
            raise self._unknown("has no experts")

    def _unknown(self, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.INVALID_FIELD,
            f"loss.router_balance_coefficient: {self._name} {why}; leave it out",
        )

    @contextmanager
    def recording(self) -> Generator[None]:
        """Keep what routers pick in a pass."""
        for each in self._taps:
            each.clear()
            each.is_on = True
        try:
            yield
        finally:
            for each in self._taps:
                each.is_on = False

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
            scores, picked = each.scores, each.picked
            is_known = each.times == 1 and scores is not None and scores.requires_grad
            if not is_known or scores is None or picked is None:
                raise self._unknown("chooses its experts in a way that is not known")
            at = to_tensor(slots, scores.device)
            layers.append(imbalance(scores[at], picked[at]))
            each.clear()
        found = share * torch.stack(layers).mean()
        return self._coefficient * found, float(found.detach())
