"""Which layers of a model get adapters, for those who train them and those who sample with them."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch import nn

from astraflow.config.lora import Lora
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.products import OnednnLinear

LayerT = TypeVar("LayerT", bound=nn.Module)


class AdaptedLayer(OnednnLinear):
    """A linear layer that takes the place of another, with its parameters under their names."""

    def __init__(self, base: nn.Linear) -> None:
        cast("Any", super()).__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias


def target_layers(module: nn.Module, settings: Lora) -> dict[str, nn.Linear]:
    """Return the layers of a model that get an adapter, by their paths.

    Raises:
        AstraflowError: INVALID_FIELD for targets that name no linear layer of the model.
    """
    layers = dict(_linear_layers(module))
    known = {last_name(path) for path in layers}
    missing = set(settings.targets) - known
    if missing or not layers:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.targets: the model has no linear layer {', '.join(sorted(missing))} to "
            f"adapt; it has {', '.join(sorted(known)) or 'none'}",
        )
    return {path: layer for path, layer in layers.items() if is_target(path, settings)}


def is_target(path: str, settings: Lora) -> bool:
    """Whether a linear layer gets an adapter."""
    return not settings.targets or last_name(path) in settings.targets


def layers_of(module: nn.Module, kind: type[LayerT]) -> Iterator[tuple[str, LayerT]]:
    """Yield the layers of one class, by their paths."""
    for path, layer in cast("Any", module).named_modules():
        if isinstance(layer, kind):
            yield path, layer


def last_name(path: str) -> str:
    """Return the last part of a path.

    Example:
        >>> last_name("model.layers.0.mlp.up_proj")
        'up_proj'
    """
    return path.rpartition(".")[2]


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield all but the output layer, which is tied to the embeddings often."""
    head = cast("Any", module).get_output_embeddings()
    return ((path, layer) for path, layer in layers_of(module, nn.Linear) if layer is not head)
