"""Weights: complete, immutable states of a model, staged beside the one that serves.

A version is a mapping from names to tensors that nobody writes to. An update makes new
tensors for what changes and shares the others, so to keep an older version costs what
differs, and to make one live is to point the parameters at it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import torch as safetensors_torch

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.updates import TensorUpdate, WeightUpdate

_TORCH = {
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.F32: torch.float32,
    Dtype.F64: torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The whole state of one version.

    Attributes:
        version: Which.
        tensors: By canonical name, in the type of the computation.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]


class Slots:
    """Where the tensors of a checkpoint go in one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        owners: dict[int, str] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._canonical: dict[str, str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            owner = owners.setdefault(id(tensor), name)
            self._canonical[name] = owner
            self._targets.setdefault(owner, tensor)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name; of tied tensors only the first name."""
        return {name: tuple(tensor.shape) for name, tensor in self._targets.items()}

    def canonical(self, name: str) -> str | None:
        """Return the first name of a tensor; None when the model has none of this name."""
        return self._canonical.get(name)

    def like(self, name: str) -> torch.Tensor:
        """Return the tensor that a canonical name stands for."""
        return self._targets[name]

    def install(self, weights: Weights) -> None:
        """Point the module at weights: no bytes are copied."""
        for name, tensor in weights.tensors.items():
            self._targets[name].data = tensor


def stage(update: WeightUpdate, slots: Slots, base: Weights | None) -> Weights:
    """Compute the state that an update leads to, beside the one that serves.

    Args:
        update: Verified.
        slots: Of the model.
        base: The live state.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor that does not fit; nothing changed.
    """
    known: dict[str, torch.Tensor] = {}
    if update.base_version is not None:
        if base is None or base.version != update.base_version:
            live = None if base is None else base.version
            raise _failed(f"version {update.version} changes {update.base_version}, not {live}")
        known.update(base.tensors)
    staged: dict[str, torch.Tensor] = {}
    for part in update.tensors:
        name = _checked(part, slots, staged)
        staged[name] = _staged(part, slots.like(name), known.get(name))
    return Weights(version=update.version, tensors=_complete({**known, **staged}, slots))


def read_directory(model_dir: Path, slots: Slots, *, version: int) -> Weights:
    """Read a state from the safetensors of a Hugging Face directory.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor or the missing files.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise _failed(f"{model_dir} has no *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _load_file(file).items():
            owner = slots.canonical(name)
            if owner is None:
                raise _failed(f"{file} has {name}, which the model does not know")
            like = slots.like(owner)
            if tensor.shape != like.shape:
                raise _failed(f"{name} has shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
            tensors[owner] = tensor.to(device=like.device, dtype=like.dtype)
    return Weights(version=version, tensors=_complete(tensors, slots))


def _load_file(path: Path) -> dict[str, torch.Tensor]:
    return cast("Any", safetensors_torch).load_file(path)


def _checked(part: TensorUpdate, slots: Slots, staged: Iterable[str]) -> str:
    """Return the canonical name of a tensor that fits the model."""
    spec = part.spec
    name = slots.canonical(spec.name)
    if name is None:
        raise _failed(f"the model has no tensor {spec.name}")
    if name in staged:
        raise _failed(f"{spec.name} comes twice, or is tied to {name}")
    shape = tuple(slots.like(name).shape)
    if spec.shape != shape:
        raise _failed(f"{spec.name} has shape {spec.shape}, the model's is {shape}")
    if spec.dtype not in _TORCH or not slots.like(name).is_floating_point():
        raise _failed(f"{spec.name} is {spec.dtype}, which the engine does not compute with")
    if part.values.dtype != spec.dtype.bits:
        raise _failed(f"{spec.name} has values of {part.values.dtype}, not {spec.dtype.bits}")
    wanted = spec.element_count if part.indices is None else len(part.indices)
    if part.values.size != wanted:
        raise _failed(f"{spec.name} has {part.values.size} values, not {wanted}")
    if part.indices is not None and len(part.indices):
        low, high = int(part.indices.min()), int(part.indices.max())
        if low < 0 or high >= spec.element_count:
            raise _failed(f"{spec.name} has elements {low} to {high} of {spec.element_count}")
    return name


def _staged(part: TensorUpdate, like: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    values = _tensor(part.values, part.spec.dtype).to(device=like.device, dtype=like.dtype)
    if part.indices is None:
        return values.reshape(like.shape)
    if base is None:
        raise _failed(f"{part.spec.name} is sparse, and there is no base to change")
    changed = base.clone()
    indices = torch.as_tensor(np.array(part.indices, np.int64), device=like.device)
    changed.view(-1)[indices] = values.reshape(-1)
    return changed


def _tensor(bits: np.ndarray, dtype: Dtype) -> torch.Tensor:
    """Return bits as a tensor of their type, copied: the caller goes on to change its own."""
    owned = np.array(bits, order="C")
    return torch.as_tensor(owned.view(f"<i{dtype.itemsize}")).view(_TORCH[dtype])


def _complete(tensors: dict[str, torch.Tensor], slots: Slots) -> Mapping[str, torch.Tensor]:
    missing = slots.shapes.keys() - tensors.keys()
    if missing:
        raise _failed(f"{min(missing)} is missing, with {len(missing) - 1} others")
    return tensors


def _failed(message: str) -> AstraflowError:
    return AstraflowError(Reason.APPLY_FAILED, f"{message}; the old version serves on")
