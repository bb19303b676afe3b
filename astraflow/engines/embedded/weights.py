"""Weights: complete states of a model, and where their tensors go in a module.

To make a version live is to point the parameters at its tensors. Versions share what they have
in common; only the tensors of the live one are ever written to, and only while no other version
that somebody can ask for has them too (see `staging`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch

from astraflow.engines.checks import apply_failed
from astraflow.engines.making import read_causal_model

_PER_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The whole state of one version.

    Attributes:
        version: Which.
        tensors: By canonical name, in the type of the computation.
        adapter: Whose, of the policies that share a base; 0 where there is one.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    adapter: int = 0


class Slots:
    """Where the tensors of a checkpoint go in one module.

    Attributes:
        adapter: Whose they are, of the policies that share a base.
        is_direct: Whether the module computes with the tensors of weights themselves.
    """

    adapter = 0
    is_direct = True

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

    def completed(self, version: int, tensors: dict[str, torch.Tensor]) -> Weights:
        """Return a state, by canonical name, when no tensor is missing.

        Raises:
            AstraflowError: APPLY_FAILED naming one that is.
        """
        missing = self.shapes.keys() - tensors.keys()
        if missing:
            raise apply_failed(f"{min(missing)} is missing, with {len(missing) - 1} others")
        return Weights(version=version, tensors=tensors, adapter=self.adapter)

    def install(self, weights: Weights) -> None:
        """Point the module at weights: no bytes are copied."""
        for name, tensor in weights.tensors.items():
            self._targets[name].data = tensor


def read_directory(model_dir: Path, slots: Slots, *, version: int) -> Weights:
    """Read a state from the safetensors of a Hugging Face directory.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor or the missing files.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise apply_failed(f"{model_dir} has no *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _read_files(model_dir, files):
        owner = slots.canonical(name)
        if owner is None:
            raise apply_failed(f"{model_dir} has {name}, which the model does not know")
        like = slots.like(owner)
        if tensor.shape != like.shape:
            raise apply_failed(f"{name} has shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
        # A copy: pages of the file would be fetched and split within the pause of a swap.
        tensors[owner] = tensor.to(device=like.device, dtype=like.dtype, copy=True)
    return slots.completed(version, tensors)


def _read_files(model_dir: Path, files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as modules call them: of experts, files have each one's and modules all."""
    for file in files:
        found: dict[str, torch.Tensor] = cast("Any", safetensors_torch).load_file(file)
        if any(_PER_EXPERT.search(name) for name in found):
            yield from _fused(model_dir)
            return
        yield from found.items()


def _fused(model_dir: Path) -> Iterable[tuple[str, torch.Tensor]]:
    return read_causal_model(model_dir, dtype=None).state_dict().items()
