"""Routers of mixtures of experts: which experts each token went through, told and replayed.

A sampler and a trainer round differently, so now and then they rank two experts differently, and
the token goes another way: log-probabilities jump where a dense model's differ by roundings.
Replay lets the trainer take the sampler's way (arXiv 2510.11370); the weights of the chosen
experts are still those of the trainer's own router, with its gradient.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED

# Logits of all experts, [tokens, experts]; weights and numbers of those chosen, [tokens, k].
Picks = tuple[Tensor, Tensor, Tensor]


def routers_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the routers of a model of transformers, layer by layer; none: it is dense."""
    return tuple(each for each in module.modules() if type(each).__name__.endswith("TopKRouter"))


class _Tap:
    """Holds what a router picked in the last pass; a copy of its module has one of its own."""

    def __init__(self) -> None:
        self.picked = torch.empty(0)

    def __call__(self, _router: nn.Module, _args: Any, output: Picks) -> None:
        self.picked = output[2]


class RouteTaps:
    """Tells which experts the tokens of a pass went through."""

    def __init__(self, module: nn.Module) -> None:
        """Listen to the routers of a model."""
        self._taps = tuple(_Tap() for _ in routers_of(module))
        for router, tap in zip(routers_of(module), self._taps, strict=True):
            router.register_forward_hook(tap)

    def last(self, rows: int, length: int) -> np.ndarray | None:
        """Return u16[rows, length, layers, k] of the last pass; None: the model is dense."""
        if not self._taps:
            return None
        picked = torch.stack([tap.picked for tap in self._taps], dim=1)
        return picked.cpu().numpy().astype(np.uint16).reshape(rows, length, len(self._taps), -1)


class RouteReplay:
    """Sends the tokens of a pass through given experts."""

    def __init__(self, module: nn.Module) -> None:
        """Take over the routers of a model whose weights are whole.

        What a router does is found out by asking it, which is not possible any more once its
        weights are shared out over ranks.
        """
        self._given: Tensor | None = None
        self._routers = routers_of(module)
        self._counts = [len(next(each.parameters())) for each in self._routers]
        self._strange: list[str] = []
        for layer, router in enumerate(self._routers):
            is_normalised = _is_normalised(router)
            if is_normalised is None:
                self._strange.append(type(router).__name__)
                continue
            router.register_forward_hook(_Replay(self, layer, is_normalised=is_normalised))

    def require(self, experts: np.ndarray) -> None:
        """Refuse what the model has no experts for.

        Args:
            experts: u16[tokens, layers, k].

        Raises:
            AstraflowError: INVALID_FIELD that says what does not fit.
        """
        fault = self._fault(experts)
        if fault:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{fault}; train the model that was sampled from, or set router_replay: never",
            )

    def expect(self, experts: np.ndarray | None) -> None:
        """Let the next passes take these experts; None: their own.

        Args:
            experts: u16[tokens, layers, k]; where it is UNROUTED the token takes its own.

        Raises:
            AstraflowError: INVALID_FIELD as `require` does.
        """
        if experts is None:
            self._given = None
            return
        self.require(experts)
        self._given = torch.as_tensor(experts.astype(np.int64))

    def given(self, layer: int, device: torch.device) -> Tensor | None:
        """Return i64[tokens, k], what a layer has to take, on the device that asks."""
        if self._given is None:
            return None
        self._given = self._given.to(device)
        return self._given[:, layer]

    def _fault(self, experts: np.ndarray) -> str | None:
        if not self._routers:
            return "a batch has routed_experts, and the model has no routers that can replay them"
        if self._strange:
            return f"{self._strange[0]} weighs its experts in a way that cannot be replayed"
        if experts.shape[1] != len(self._routers):
            return (
                f"routed_experts has {experts.shape[1]} layers and the model {len(self._routers)} "
                "with experts"
            )
        highest = int(np.where(experts == UNROUTED, 0, experts).max(initial=0))
        if highest >= min(self._counts):
            return f"routed_experts names expert {highest} of {min(self._counts)}"
        return None


class _Replay:
    def __init__(self, owner: RouteReplay, layer: int, *, is_normalised: bool) -> None:
        self._owner = owner
        self._layer = layer
        self._is_normalised = is_normalised

    def __call__(self, _router: nn.Module, _args: Any, output: Picks) -> Picks | None:
        logits, scores, own = output
        given = self._owner.given(self._layer, logits.device)
        if given is None:
            return None
        taken = torch.where(given == UNROUTED, own, given)
        weights = _weights(logits, taken, is_normalised=self._is_normalised)
        return logits, weights.to(scores.dtype), taken


def _weights(logits: Tensor, taken: Tensor, *, is_normalised: bool) -> Tensor:
    """Return [tokens, k]: softmax over all experts, of those taken, which may add up to 1."""
    chosen = torch.softmax(logits.float(), dim=-1).gather(1, taken)
    return chosen / chosen.sum(dim=-1, keepdim=True) if is_normalised else chosen


@torch.no_grad()
def _is_normalised(router: nn.Module) -> bool | None:
    """Return whether the weights of the chosen experts add up to 1, by what the router does.

    None: they are neither such nor shares of all experts.
    """
    like = next(router.parameters())
    chance = torch.Generator().manual_seed(0)
    states = torch.randn(16, like.shape[-1], generator=chance).to(like)
    logits, scores, taken = cast("Picks", router(states))
    for is_normalised in (True, False):
        weights = _weights(logits, taken, is_normalised=is_normalised).to(scores.dtype)
        if weights.shape == scores.shape and torch.allclose(weights, scores):
            return is_normalised
    return None
