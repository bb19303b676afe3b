"""The auxiliary loss of mixtures of experts: least where a layer's experts are chosen alike."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.routers import Picks, routers_of
from astraflow.trainers.tensors import to_tensor


def imbalance(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return E sum_e f_e P_e of one layer: Switch Transformers (arXiv 2101.03961, eq. 4).

    f_e is the share of choices that expert e got, P_e its mean probability. 1 where both are even.

    Args:
        logits: f[n, E], of the router.
        chosen: i64[n, k], the experts that each token took.
    """
    count = logits.shape[1]
    shares = torch.bincount(chosen.flatten(), minlength=count) / chosen.numel()
    return count * (shares * logits.float().softmax(-1).mean(0)).sum()


class RouterBalance:
    """Adds the imbalance of a model's routers to the loss of each pass.

    Attributes:
        is_asked: Whether the recipe has such a loss.
    """

    def __init__(self, module: nn.Module, coefficient: float) -> None:
        """Listen to the routers of a model, if there is such a loss.

        Raises:
            AstraflowError: INVALID_FIELD when the model has no routers.
        """
        self.is_asked = coefficient > 0
        self._coefficient = coefficient
        self._is_listening = False
        self._picked: list[tuple[Tensor, Tensor]] = []
        if not self.is_asked:
            return
        routers = routers_of(module)
        if not routers:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"loss.router_balance_coefficient: {type(module).__name__} has no routers of "
                "experts that are known; leave it out",
            )
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _router: nn.Module, _args: Any, output: Picks) -> None:
        if self._is_listening:
            self._picked.append((output[0], output[2]))

    @contextmanager
    def listening(self) -> Generator[None]:
        """Keep what routers pick in a pass."""
        self._picked.clear()
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False

    def loss(self, slots: Any, *, share: float) -> tuple[Tensor, float]:
        """Return the loss of the pass, a scalar with a gradient, and the imbalance in it.

        Args:
            slots: i64[t], which tokens of the pass are no padding.
            share: Of the pass in the update; the imbalance is a mean over passes and layers.
        """
        if not share:
            return torch.zeros(()), 0.0
        at = to_tensor(slots, self._picked[0][0].device)
        layers = [imbalance(logits[at], chosen[at]) for logits, chosen in self._picked]
        found = share * torch.stack(layers).mean()
        self._picked.clear()
        return self._coefficient * found, float(found.detach())
