"""Model files: a Hugging Face directory, as a trainer writes it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from astraflow.trainers.checkpoints import placed
from astraflow.trainers.lora import (
    adapter_settings,
    load_adapted_model,
    merge_adapters,
    read_lora,
    write_adapters,
    write_settings,
)

Made = TypeVar("Made")

# What belongs to a model beside its weights and config.json, where it has it.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def save_model(module: nn.Module, target: Path, *, companions_of: Path | None = None) -> None:
    """Write a Hugging Face directory; a reader sees all of it or nothing.

    Of a model with adapters these alone are written, as peft has them. A directory that is there
    is replaced; tokenizer files come from that of the companions.
    """
    with placed(target) as draft:
        write_model(module, draft, companions_of=companions_of)


def on_host(state: Made) -> Made:
    """Return a state with its tensors copied to the host, those that share their memory once."""
    copies: dict[tuple[object, ...], Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if not value.numel() or key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map(copied, state)


def write_model(
    module: nn.Module,
    directory: Path,
    *,
    companions_of: Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model into a directory that is there; see `save_model`.

    Weights are of its `state_dict`; None: those that it has now.
    """
    adapters = adapter_settings(module)
    if adapters is None:
        cast("Any", module).save_pretrained(directory, state_dict=weights)
    else:
        write_adapters(module, adapters, directory, weights=weights)
    _copy_companions(directory, companions_of)


def write_description(
    module: nn.Module, directory: Path, *, companions_of: Path | None = None
) -> None:
    """Write what belongs to a model, or to its adapters, beside the weights."""
    model, adapters = cast("Any", module), adapter_settings(module)
    if adapters is not None:
        write_settings(adapters, directory)
    else:
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    _copy_companions(directory, companions_of)


def _copy_companions(directory: Path, companions_of: Path | None) -> None:
    for name in _COMPANIONS if companions_of else ():
        source = cast("Path", companions_of) / name
        if source.exists():
            shutil.copyfile(source, directory / name)


def write_merged(base: Path, adapters: Path, target: Path) -> None:
    """Write the Hugging Face directory, in f32, of a model with adapters added to its weights.

    A directory that is there is replaced.

    Raises:
        AstraflowError: INVALID_FIELD when the adapters are not there, or not of this model.
    """
    model = load_adapted_model(base, read_lora(adapters), adapters=adapters, device="cpu")
    merge_adapters(model.module)
    save_model(model.module, target, companions_of=base)
