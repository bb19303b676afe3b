"""Low-rank adapters: a model's own weights stay, what is trained lies beside its linear layers.

The formula is that of LoRA (arXiv 2106.09685, section 4.1): W x + alpha / rank * B A x. On disk
adapters are the files of peft.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn

from astraflow.config.lora import CONFIG_FILE, TENSOR_FILE, Lora, last_name, tensor_name
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import AdaptedLayer, layers_of, target_layers
from astraflow.trainers.causal_model import CausalModel, load_causal_model


class AdaptedLinear(AdaptedLayer):
    """A linear layer whose weight is frozen, and an adapter; at first it changes nothing."""

    def __init__(self, base: nn.Linear, settings: Lora, *, seed: int) -> None:
        """Take over a layer with its parameters; the seed is that of A, B is 0."""
        super().__init__(base)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, settings.rank, bias=False, **like)
        self.lora_B = nn.Linear(settings.rank, base.out_features, bias=False, **like)
        self.settings = settings
        # On the CPU: the same numbers for every device.
        chance = torch.Generator().manual_seed(seed)
        first = torch.empty(self.lora_A.weight.shape)
        nn.init.uniform_(first, -1, 1, generator=chance)
        with torch.no_grad():
            self.lora_A.weight.copy_(first / base.in_features**0.5)
            self.lora_B.weight.zero_()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch calls it
        added = self.lora_B(self.lora_A(input))
        return super().forward(input) + self.settings.scale * added

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight of the plain layer that says the same."""
        return self.weight + self.settings.scale * (self.lora_B.weight @ self.lora_A.weight)


def add_adapters(module: nn.Module, settings: Lora, *, seed: int = 0) -> None:
    """Freeze a model and put an adapter beside every target, the same ones for the same model.

    Another seed begins with other adapters.

    Raises:
        AstraflowError: INVALID_FIELD for targets that name no linear layer of the model.
    """
    layers = target_layers(module, settings)
    module.requires_grad_(requires_grad=False)
    for name, layer in layers.items():
        module.set_submodule(name, AdaptedLinear(layer, settings, seed=crc32(name.encode(), seed)))


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is trained and published of a model: its adapters if it has any, or all of it.

    Adapters are called as peft calls them, all else as in the checkpoint. A tied tensor is there
    once, by its first name.
    """
    adapters = {
        tensor_name(f"{name}.{factor}.weight"): cast("nn.Parameter", getattr(layer, factor).weight)
        for name, layer in layers_of(module, AdaptedLinear)
        for factor in ("lora_A", "lora_B")
    }
    return adapters or dict(module.named_parameters())


def adapter_settings(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the rest of an adapter's files, see `Lora.as_peft`; None: the model has none."""
    layers = dict(layers_of(module, AdaptedLinear))
    if not layers:
        return None
    settings = next(iter(layers.values())).settings
    base = str(cast("Any", module).config.name_or_path)
    return settings.as_peft(base=base, targets=tuple(sorted({last_name(name) for name in layers})))


def merge_adapters(module: nn.Module) -> None:
    """Turn a model with adapters into the plain model that says the same."""
    for name, layer in list(layers_of(module, AdaptedLinear)):
        layer.weight = nn.Parameter(layer.merged())
        module.set_submodule(name, AdaptedLayer(layer))


def write_adapters(
    module: nn.Module,
    settings: Mapping[str, Any],
    directory: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of a model, and `adapter_settings` of it, into a directory that is there.

    Weights are of its `state_dict`; None: those that it has now.
    """
    write_settings(settings, directory)
    trained = trained_parameters(module)
    if weights is not None:
        of = {id(each): name for name, each in module.named_parameters()}
        trained = {name: weights[of[id(each)]] for name, each in trained.items()}
    tensors = {name: each.detach().cpu().contiguous() for name, each in trained.items()}
    cast("Any", safetensors_torch).save_file(
        tensors, directory / TENSOR_FILE, metadata={"format": "pt"}
    )


def write_settings(settings: Mapping[str, Any], directory: Path) -> None:
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def read_adapters(module: nn.Module, directory: Path) -> None:
    """Set the adapters of a model to those of a directory.

    Raises:
        AstraflowError: INVALID_FIELD when these are not adapters of this model.
    """
    own = trained_parameters(module)
    try:
        found: Mapping[str, Tensor] = cast("Any", safetensors_torch).load_file(
            directory / TENSOR_FILE
        )
    except (OSError, SafetensorError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"the adapters in {directory} cannot be read: {error}; give a checkpoint of adapters",
        ) from error
    shapes = {name: tuple(each.shape) for name, each in found.items()}
    if shapes != {name: tuple(each.shape) for name, each in own.items()}:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{directory} has other adapters than the model: {len(shapes)} tensors, not "
            f"{len(own)}, or of another rank; give the recipe's model and model.lora",
        )
    for name, parameter in own.items():
        parameter.copy_(found[name])


def load_adapted_model(
    base: Path, settings: Lora, *, adapters: Path | None = None, device: str = "auto"
) -> CausalModel:
    """Load a model and give it adapters, fresh ones or those of a directory.

    Raises:
        AstraflowError: INVALID_FIELD when a directory cannot be loaded, or does not fit.
    """
    model = load_causal_model(base, device=device)
    add_adapters(model.module, settings)
    if adapters is not None:
        read_adapters(model.module, adapters)
    return model


def read_lora(directory: Path) -> Lora:
    """Return the settings of the adapters in a directory.

    Raises:
        AstraflowError: INVALID_FIELD when there are none.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{directory} has no {CONFIG_FILE}; give a folder of adapters"
        )
    fields = json.loads(path.read_text())
    return Lora(
        rank=fields["r"], alpha=fields["lora_alpha"], targets=tuple(fields["target_modules"])
    )
