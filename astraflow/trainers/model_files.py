"""Model files: a Hugging Face directory, as a trainer writes it."""

import shutil
from pathlib import Path
from typing import Any, cast

from torch import nn

from astraflow.trainers.checkpoints import placed
from astraflow.trainers.lora import (
    adapter_settings,
    load_adapted_model,
    merge_adapters,
    read_lora,
    write_adapters,
    write_settings,
)

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

    Of a model with adapters these alone are written, as peft has them.

    Args:
        module: A Hugging Face model.
        target: The directory; one that is there is replaced.
        companions_of: Directory whose tokenizer files are copied.
    """
    with placed(target) as draft:
        write_model(module, draft, companions_of=companions_of)


def write_model(module: nn.Module, directory: Path, *, companions_of: Path | None = None) -> None:
    """Write a model into a directory; see `save_model`."""
    adapters = adapter_settings(module)
    if adapters is None:
        cast("Any", module).save_pretrained(directory)
    else:
        write_adapters(module, adapters, directory)
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


def copy_description(source: Path, directory: Path) -> None:
    """Copy what belongs to a model beside its weights from where it was loaded."""
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    _copy_companions(directory, source)


def _copy_companions(directory: Path, companions_of: Path | None) -> None:
    for name in _COMPANIONS if companions_of else ():
        source = cast("Path", companions_of) / name
        if source.exists():
            shutil.copyfile(source, directory / name)


def write_merged(base: Path, adapters: Path, target: Path) -> None:
    """Write the Hugging Face directory, in f32, of a model with adapters added to its weights.

    Args:
        base: The model that they were trained beside.
        adapters: A checkpoint of them.
        target: The directory; one that is there is replaced.

    Raises:
        AstraflowError: INVALID_FIELD when the adapters are not there, or not of this model.
    """
    model = load_adapted_model(base, read_lora(adapters), adapters=adapters, device="cpu")
    merge_adapters(model.module)
    save_model(model.module, target, companions_of=base)
