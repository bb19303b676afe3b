"""Adapters: several policies on one base model, each row of a pass with those of its own.

Beside every linear layer lie the adapters of all policies, one below the other: A of all ranks
together, and B. A pass multiplies by all of them; in between, what is not a row's own is taken
times 0, and its own times alpha / rank. So one decode step serves all policies, and the base is
in memory and read once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from astraflow.config.lora import Lora, is_target, tensor_name
from astraflow.engines.checks import apply_failed
from astraflow.engines.embedded.weights import Slots, Weights
from astraflow.engines.modules import AdaptedLayer, layers_of, target_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlace:
    """Where the adapters of one policy lie.

    Attributes:
        first: First of its ranks.
    """

    index: int
    first: int
    settings: Lora

    @property
    def ranks(self) -> slice:
        return slice(self.first, self.first + self.settings.rank)


def places_of(settings: Sequence[Lora]) -> tuple[AdapterPlace, ...]:
    """Return where the adapters of some policies lie, one after the other.

    Example:
        >>> [place.ranks for place in places_of([Lora(rank=4), Lora(rank=8)])]
        [slice(0, 4, None), slice(4, 12, None)]
    """
    firsts = [sum(each.rank for each in settings[:index]) for index in range(len(settings))]
    return tuple(
        AdapterPlace(index=index, first=first, settings=each)
        for index, (first, each) in enumerate(zip(firsts, settings, strict=True))
    )


class Shares:
    """What each row of the next pass takes of each rank.

    Attributes:
        of_rows: [rows, ranks].
    """

    __slots__ = ("of_rows",)

    def __init__(self) -> None:
        self.of_rows = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, object]) -> "Shares":
        """Return one of its own: a copy of a module runs other passes."""
        return Shares()


class SharedLinear(AdaptedLayer):
    """A linear layer and the adapters of all policies beside it."""

    def __init__(self, base: nn.Linear, *, rank_count: int, shares: Shares) -> None:
        super().__init__(base)
        self.lora_A = _zeros(base.weight, rank_count, base.in_features)
        self.lora_B = _zeros(base.weight, rank_count, base.out_features)
        self.shares = shares

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch calls it
        """Return what the layer and each row's adapter say of [rows, tokens, inputs]."""
        inner = nn.functional.linear(input, self.lora_A) * self.shares.of_rows[:, None]
        return super().forward(input) + inner @ self.lora_B


def _zeros(like: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(like.new_zeros(shape), requires_grad=False)


def add_adapter_places(module: nn.Module, places: Sequence[AdapterPlace]) -> None:
    """Make room for the adapters of some policies beside the layers that they adapt.

    Raises:
        AstraflowError: INVALID_FIELD for targets that name no linear layer of the model.
    """
    shares = Shares()
    rank_count = max(place.ranks.stop for place in places)
    layers = {
        path: layer
        for place in places
        for path, layer in target_layers(module, place.settings).items()
    }
    for path, layer in layers.items():
        module.set_submodule(path, SharedLinear(layer, rank_count=rank_count, shares=shares))
    cast("Any", module).adapter_shares = shares


class AdapterSlots(Slots):
    """Where the tensors of one policy's adapters go in a module with room for them."""

    is_direct = False

    def __init__(self, module: nn.Module, place: AdapterPlace) -> None:
        self._place = place
        self.adapter = place.index
        self._layers = {
            path: layer
            for path, layer in layers_of(module, SharedLinear)
            if is_target(path, place.settings)
        }
        self._targets = {}
        for path, layer in self._layers.items():
            first, second = _names(path)
            self._targets[first] = layer.lora_A[place.ranks]
            self._targets[second] = layer.lora_B[place.ranks].T
        self._canonical = {name: name for name in self._targets}

    def completed(self, version: int, tensors: dict[str, Tensor]) -> Weights:
        """Return a state; one that is not finite would spoil the rows of other policies."""
        weights = super().completed(version, tensors)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise apply_failed(f"{name} of version {version} is not finite")
        return weights

    def install(self, weights: Weights) -> None:
        """Put adapters beside those of the others, which stay."""
        ranks = self._place.ranks
        for path, layer in self._layers.items():
            first, second = (weights.tensors[name] for name in _names(path))
            layer.lora_A.data = _replaced(layer.lora_A, ranks, first)
            layer.lora_B.data = _replaced(layer.lora_B, ranks, second.T)


def row_scales(module: nn.Module, places: Sequence[AdapterPlace]) -> Tensor | None:
    """Return [policies, ranks], what a row of each policy takes of each rank; None: no adapters."""
    if not places:
        return None
    rank_count = max(place.ranks.stop for place in places)
    scales = next(module.parameters()).new_zeros(len(places), rank_count)
    for place in places:
        scales[place.index, place.ranks] = place.settings.scale
    return scales


def slots_of(module: nn.Module, places: Sequence[AdapterPlace]) -> Mapping[int, Slots]:
    """Return where weights go in a module, by policy; without adapters there is one."""
    return {place.index: AdapterSlots(module, place) for place in places} or {0: Slots(module)}


def _names(path: str) -> tuple[str, str]:
    return tensor_name(f"{path}.lora_A.weight"), tensor_name(f"{path}.lora_B.weight")


def _replaced(stack: Tensor, ranks: slice, part: Tensor) -> Tensor:
    """Return a stack of its own with one part exchanged: a pinned version may share the old one."""
    made = stack.detach().clone()
    made[ranks] = part
    return made
