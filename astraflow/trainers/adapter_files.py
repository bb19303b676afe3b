"""Adapters on disk, in the files of peft."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import nn

from astraflow.config.lora import CONFIG_FILE, TENSOR_FILE, Lora
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import CausalModel, load_causal_model
from astraflow.trainers.lora import add_adapters, trained_parameters


def write_adapters(module: nn.Module, settings: Mapping[str, Any], directory: Path) -> None:
    """Write the adapters of a model into a directory that is there.

    Args:
        module: Of a model with adapters.
        settings: Of these, see `adapter_settings`.
        directory: That peft can load then.
    """
    write_settings(settings, directory)
    tensors = {
        name: each.detach().cpu().contiguous() for name, each in trained_parameters(module).items()
    }
    cast("Any", safetensors_torch).save_file(
        tensors, directory / TENSOR_FILE, metadata={"format": "pt"}
    )


def write_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """Write what peft has to know of adapters."""
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def read_adapters(module: nn.Module, directory: Path) -> None:
    """Set the adapters of a model to those of a directory.

    Raises:
        AstraflowError: INVALID_FIELD when these are not adapters of this model.
    """
    own, found = trained_parameters(module), _read_tensors(directory)
    shapes = {name: tuple(each.shape) for name, each in found.items()}
    if shapes != {name: tuple(each.shape) for name, each in own.items()}:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{directory} has other adapters than the model: {len(shapes)} tensors, not "
            f"{len(own)}, or of another rank; give the recipe's model and model.lora",
        )
    for name, parameter in own.items():
        parameter.copy_(found[name])


def _read_tensors(directory: Path) -> Mapping[str, torch.Tensor]:
    try:
        return cast("Any", safetensors_torch).load_file(directory / TENSOR_FILE)
    except (OSError, SafetensorError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"the adapters in {directory} cannot be read: {error}; give a checkpoint of adapters",
        ) from error


def load_adapted_model(
    base: Path, settings: Lora, *, adapters: Path | None = None, device: str = "auto"
) -> CausalModel:
    """Load a model and give it adapters, fresh ones or those of a directory.

    Raises:
        AstraflowError: INVALID_FIELD when a directory cannot be loaded, or does not fit.
    """
    model = load_causal_model(base, device=device)
    adapt(model.module, settings, adapters=adapters)
    return model


def adapt(module: nn.Module, settings: Lora, *, adapters: Path | None = None) -> None:
    """Give a model adapters, fresh ones or those of a directory.

    Raises:
        AstraflowError: INVALID_FIELD when the targets or the directory do not fit.
    """
    add_adapters(module, settings)
    if adapters is not None:
        read_adapters(module, adapters)


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
