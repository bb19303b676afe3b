"""Routers of mixtures of experts: which experts each token went through, told and replayed.

A sampler and a trainer round differently, so now and then they rank two experts differently, and
the token goes another way: log-probabilities jump where a dense model's differ by roundings.
Replay lets the trainer take the sampler's way (arXiv 2510.11370); the weights of the chosen
experts are still those of the trainer's own router, with its gradient.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED

_CHOICES = (torch.topk, Tensor.topk)


class Mixture(NamedTuple):
    """A layer of experts with the router that chooses among them, and how many there are."""

    module: nn.Module
    expert_count: int


def mixtures_of(module: nn.Module) -> tuple[Mixture, ...]:
    """Return the mixtures of experts of a model, layer by layer; none: it is dense.

    They are known by their weights, whatever their classes: those of experts are [experts, a, b],
    and the smallest module around them with another of [experts, ...] has the router as well.
    """
    modules = dict(cast("Any", module).named_modules())
    found: dict[str, int] = {}
    for bank, count in _banks(modules):
        around = bank
        while around and not _has_router(modules, bank, around, count):
            around = around.rpartition(".")[0]
        found.setdefault(around, count)
    if not found and any(path.endswith("experts") for path in modules):
        # They are kept in another form: of these it is known that they cannot be replayed.
        found[""] = 0
    return tuple(Mixture(modules[path], found[path]) for path in modules if path in found)


def _banks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Yield the paths of modules whose own weights are of several experts, and how many."""
    for path, each in modules.items():
        # A convolution has weights of three dimensions, too.
        if not path or type(each).__module__.startswith("torch.nn."):
            continue
        own: Iterator[tuple[str, Tensor]] = cast("Any", each).named_parameters(recurse=False)
        counts = [weight.shape[0] for _, weight in own if weight.ndim == 3]
        if counts and min(counts) == max(counts) > 1:
            yield path, counts[0]


def _has_router(modules: Mapping[str, nn.Module], bank: str, around: str, count: int) -> bool:
    weights: Iterator[tuple[str, Tensor]] = cast("Any", modules[around]).named_parameters()
    return any(
        weight.ndim == 2
        and weight.shape[0] == count
        and not f"{around}.{name}".startswith(f"{bank}.")
        for name, weight in weights
    )


class _Choosing(TorchFunctionMode):
    """While a mixture computes: hears of each choice among its experts, and may change it.

    A router scores all experts of each token and takes the best, which in all of transformers is
    `torch.topk` of [tokens, experts]; what it makes of the scores of those taken is its own.
    """

    def __init__(self, watch: "MixtureWatch") -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        if func not in _CHOICES:
            return result
        scores: Tensor = args[0]
        is_choice = scores.ndim == 2 and scores.shape[1] == self._watch.expert_count
        return self._watch.chosen(scores, result) if is_choice else result


class MixtureWatch:
    """Hears what one mixture chooses; a copy of its module has one of its own."""

    def __init__(self, mixture: Mixture) -> None:
        self.expert_count = mixture.expert_count
        self.choice_count: int = 0
        self._modes: list[Any] = []
        mixture.module.register_forward_pre_hook(self._enter)
        # The last mode that was entered is left first; also when a pass fails, or is cut off.
        mixture.module.register_forward_hook(self._leave, prepend=True, always_call=True)

    def is_needed(self) -> bool:
        return True

    def chosen(self, scores: Tensor, result: Any) -> Any:
        """Take note of a choice, and return what is chosen instead.

        Args:
            scores: f[tokens, experts].
            result: Of `torch.topk`.
        """
        raise NotImplementedError

    def passed(self) -> None:
        """Note that the mixture has computed."""

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        if self.is_needed():
            self.choice_count = 0
            mode: Any = _Choosing(self)
            self._modes.append(mode)
            mode.__enter__()

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)
            if output is not None:
                self.passed()


class _Tap(MixtureWatch):
    """Holds what was chosen in the last pass, and nothing that it was chosen from."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__(mixture)
        self.picked: Tensor | None = None

    def chosen(self, scores: Tensor, result: Any) -> Any:
        del scores
        self.picked = result[1]
        return result


class RouteTaps:
    """Tells which experts the tokens of a pass went through."""

    def __init__(self, module: nn.Module) -> None:
        self._taps = tuple(map(_Tap, mixtures_of(module)))

    def last(self, rows: int, length: int) -> np.ndarray | None:
        """Return u16[rows, length, layers, k] of the last pass; None: there is nothing to tell.

        That is of a dense model, and of one that chooses in a way that is not known.
        """
        picks = [tap.picked for tap in self._taps if tap.picked is not None]
        if not picks or len(picks) < len(self._taps):
            return None
        picked = torch.stack(picks, dim=1)
        return picked.cpu().numpy().astype(np.uint16).reshape(rows, length, len(picks), -1)


class RouteReplay:
    """Sends the tokens of a pass through given experts.

    What a router computes of the scores of its experts it does itself, for those that are given:
    sums to one, scales and gradients are the model's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._given: Tensor | None = None
        self.model_name = type(module).__name__
        self._mixtures = [
            _Replay(self, layer, mixture) for layer, mixture in enumerate(mixtures_of(module))
        ]

    @property
    def has_mixtures(self) -> bool:
        return bool(self._mixtures)

    @property
    def is_known(self) -> bool:
        """Whether a pass has shown how the model chooses."""
        return all(each.choice_count == 1 for each in self._mixtures)

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

    def require_choices(self) -> None:
        """Refuse a model whose last pass chose in a way that cannot be replayed.

        Raises:
            AstraflowError: INVALID_FIELD that names the layer.
        """
        for each in self._mixtures:
            each.require_choice()

    def expect(self, experts: np.ndarray | None) -> None:
        """Let the next passes take these experts; None: their own.

        A pass over a model that chooses in an unknown way fails then, as `require_choices` does.

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

    @property
    def is_replaying(self) -> bool:
        return self._given is not None

    def _fault(self, experts: np.ndarray) -> str | None:
        if not self._mixtures:
            return (
                f"a batch has routed_experts, and {self.model_name} has no routers that can "
                "replay them"
            )
        if experts.shape[1] != len(self._mixtures):
            return (
                f"routed_experts has {experts.shape[1]} layers and the model {len(self._mixtures)} "
                "with experts"
            )
        highest = int(np.where(experts == UNROUTED, 0, experts).max(initial=0))
        count = min(each.expert_count for each in self._mixtures)
        if highest >= count:
            return f"routed_experts names expert {highest} of {count}"
        return None


class _Replay(MixtureWatch):
    def __init__(self, owner: RouteReplay, layer: int, mixture: Mixture) -> None:
        super().__init__(mixture)
        self._owner = owner
        self._layer = layer
        self._name = type(mixture.module).__name__

    def is_needed(self) -> bool:
        return self._owner.is_replaying or self.choice_count != 1

    def chosen(self, scores: Tensor, result: Any) -> Any:
        given = self._owner.given(self._layer, scores.device)
        own: Tensor = result[1]
        if given is not None and given.shape != own.shape:
            return result
        self.choice_count += 1
        if given is None:
            return result
        taken = torch.where(given == UNROUTED, own, given)
        return cast("Any", torch.return_types).topk((scores.gather(1, taken), taken))

    def passed(self) -> None:
        if self._owner.is_replaying:
            self.require_choice()

    def require_choice(self) -> None:
        """Refuse a mixture that has not chosen exactly once in its last pass, or never computed."""
        if self.choice_count != 1:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{self._name} of {self._owner.model_name} chooses its experts in a way that"
                " cannot be replayed; set router_replay: never",
            )
