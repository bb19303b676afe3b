"""A sharded model as one safetensors file: every rank writes its own rows, nothing is gathered."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where a tensor lies in the file.

    Attributes:
        tensor: A DTensor that is sharded by rows, or one that every rank has.
        offset: Of its first byte.
        row_nbytes: Of one of its rows; of a scalar, all.
    """

    tensor: Tensor
    offset: int
    row_nbytes: int


def write_sharded_weights(
    module: nn.Module, directory: Path, ranks: Ranks
) -> Callable[[], OSError | None]:
    """Write the file of a model or of its adapters; all ranks call it, and see one directory.

    Args:
        module: A Hugging Face model.
        directory: Is there.
        ranks: All of them.

    Returns:
        What brings this rank's rows to the disk, and returns what went wrong; on any thread.

    Raises:
        AstraflowError: What went wrong on one of them.
    """
    is_adapted = adapter_settings(module) is not None
    tensors = trained_parameters(module) if is_adapted else _tensors(module)
    header, places, nbytes = _laid_out(tensors)
    path = directory / (TENSOR_FILE if is_adapted else _MODEL_FILE)
    ranks.agree(_tried(lambda: _begin(path, header, nbytes)) if ranks.rank == 0 else None)
    ranks.agree(_tried(lambda: _write_rows(path, places, ranks)))
    return lambda: _tried(lambda: _sync(path))


def _tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return what a checkpoint holds: parameters, a tied one once, and buffers that are kept."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {**parameters, **{name: state[name] for name in state if name not in tied}}


def _laid_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[_Place], int]:
    """Return the header with its length before it, where the tensors lie, and the file's size.

    The format is https://github.com/huggingface/safetensors, "Format".
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = [
        _Place(
            tensor=tensor,
            offset=len(header) + entries[name]["data_offsets"][0],
            row_nbytes=tensor.numel() // max(1, _row_count(tensor)) * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    ]
    return header, places, len(header) + end


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _begin(path: Path, header: bytes, nbytes: int) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(nbytes)


def _write_rows(path: Path, places: list[_Place], ranks: Ranks) -> None:
    if not ranks.publishes:
        return
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for part, offset in _parts(places, ranks):
            _write(descriptor, part, offset)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _parts(places: list[_Place], ranks: Ranks) -> Iterator[tuple[memoryview, int]]:
    """Yield this rank's bytes and where they belong; rank 0 has what is not sharded."""
    for place in places:
        mine = ranks.rows_of(place.tensor).detach()
        is_shard = hasattr(place.tensor, "to_local")
        if not mine.numel() or not (is_shard or ranks.rank == 0):
            continue
        share = -(-_row_count(place.tensor) // ranks.shard_count)
        first = share * ranks.shard_rank if is_shard else 0
        flat = mine.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        yield flat.data, place.offset + first * place.row_nbytes


def _write(descriptor: int, part: memoryview, offset: int) -> None:
    while part:
        written = os.pwrite(descriptor, part, offset)
        part, offset = part[written:], offset + written


def _tried(act: Any) -> OSError | None:
    try:
        act()
    except OSError as error:
        return error
    return None
