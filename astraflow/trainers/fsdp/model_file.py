"""A sharded model as one safetensors file: every rank writes its own rows, nothing is gathered."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from astraflow.config.lora import TENSOR_FILE
from astraflow.trainers.fsdp.ranks import Ranks
from astraflow.trainers.lora import adapter_settings, trained_parameters

_MODEL_FILE: Final = "model.safetensors"
_NAMES: Final = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_sharded_weights(
    module: nn.Module, directory: Path, ranks: Ranks
) -> Callable[[], OSError | None]:
    """Write the file of a model or of its adapters; all ranks call it, and see one directory.

    Returns:
        What brings this rank's rows to the disk, and returns what went wrong; on any thread.

    Raises:
        AstraflowError: What went wrong on one of them.
    """
    is_adapted = adapter_settings(module) is not None
    tensors = trained_parameters(module) if is_adapted else _tensors(module)
    header, offsets, nbytes = _laid_out(tensors)
    path = directory / (TENSOR_FILE if is_adapted else _MODEL_FILE)

    def begin() -> None:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(nbytes)

    def sync() -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    ranks.agree(_tried(begin) if ranks.rank == 0 else None)
    ranks.agree(_tried(lambda: _write_rows(path, tensors, offsets, ranks)))
    return lambda: _tried(sync)


def _tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return what a checkpoint holds: parameters, a tied one once, and buffers that are kept."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {**parameters, **{name: state[name] for name in state if name not in tied}}


def _laid_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, Mapping[str, int], int]:
    """Return the header with its length before it, where the tensors begin, and the file's size.

    The format is https://github.com/huggingface/safetensors, "Format".
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return header, offsets, len(header) + end


def _write_rows(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, int], ranks: Ranks
) -> None:
    """Write this rank's rows where they belong; rank 0 has what is not sharded."""
    if not ranks.publishes:
        return
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            mine = ranks.rows_of(tensor).detach()
            is_shard = hasattr(tensor, "to_local")
            if not mine.numel() or not (is_shard or ranks.rank == 0):
                continue
            row_count = tensor.shape[0] if tensor.ndim else 1
            first = -(-row_count // ranks.shard_count) * ranks.shard_rank if is_shard else 0
            row_nbytes = tensor.numel() // row_count * tensor.element_size()
            file.seek(offsets[name] + first * row_nbytes)
            file.write(mine.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _tried(act: Any) -> OSError | None:
    try:
        act()
    except OSError as error:
        return error
    return None
