"""Weights: complete states of a model, an engine's versions, and how the next one is staged.

To make a version live is to point the parameters at its tensors. Versions share what they have
in common; only the tensors of the live one are ever written to, and only while no other version
that somebody can ask for has them too.

What an update needs is made beside generation, so that its commit is short. Of a tensor of which
little changes, the new values are scattered into the live tensor between two decode steps; the old
ones, gathered before, undo it. A tensor of which much changes, or which a version that can still be
asked for shares, is written anew beside the live one, and the commit points the parameter at it. So
the pause is O(elements scattered); the extra memory is at most that of the update, except while an
older version is kept, which then keeps its bits.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import torch as safetensors_torch

from astraflow.core.tensors import TensorUpdate, WeightUpdate
from astraflow.engines.checks import apply_failed, check_part
from astraflow.engines.modules import TORCH_TYPES, read_causal_model

_PER_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The whole state of one version.

    Attributes:
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
    for name, tensor in _read_files(model_dir, files, slots):
        owner = slots.canonical(name)
        if owner is None:
            raise apply_failed(f"{model_dir} has {name}, which the model does not know")
        like = slots.like(owner)
        if tensor.shape != like.shape:
            raise apply_failed(f"{name} has shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
        # A copy: pages of the file would be fetched and split within the pause of a swap.
        tensors[owner] = tensor.to(device=like.device, dtype=like.dtype, copy=True)
    return slots.completed(version, tensors)


def _read_files(
    model_dir: Path, files: Sequence[Path], slots: Slots
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as modules call them.

    Of experts files have each one's and modules all; a head may have another name, as GPT-NeoX's
    `embed_out` has. Then transformers reads them, and what it has no place for is refused.
    """
    for file in files:
        found: dict[str, torch.Tensor] = cast("Any", safetensors_torch).load_file(file)
        if any(_PER_EXPERT.search(name) or slots.canonical(name) is None for name in found):
            try:
                module = read_causal_model(model_dir, dtype=None, must_fit=True)
            except (OSError, ValueError, RuntimeError) as error:
                raise apply_failed(f"{model_dir} does not fit the model: {error}") from error
            yield from module.state_dict().items()
            return
        yield from found.items()


class VersionSet:
    """What of a policy is live, pinned and kept; each is replaced whole, any thread may read it.

    Attributes:
        weights: Live; None before the first commit.
        pins: Counts by version.
        kept: Versions that are pinned or still decoded; no commit may change them.
    """

    __slots__ = ("kept", "pins", "weights")

    def __init__(self) -> None:
        self.weights: Weights | None = None
        self.pins: dict[int, int] = {}
        self.kept: tuple[Weights, ...] = ()

    def serving(self, version: int) -> Weights | None:
        """Return a version that is live or pinned."""
        if self.weights is not None and self.weights.version == version:
            return self.weights
        pinned = (kept for kept in self.kept if kept.version in self.pins)
        return next((kept for kept in pinned if kept.version == version), None)

    def keep(self, weights: Weights) -> None:
        """Let no commit change a version."""
        self.kept = (*(kept for kept in self.kept if kept.version != weights.version), weights)

    def drop(self, version: int) -> None:
        self.kept = tuple(kept for kept in self.kept if kept.version != version)

    def pin(self, weights: Weights) -> None:
        """Keep a version until it is unpinned as often."""
        self.keep(weights)
        self.pins = {**self.pins, weights.version: self.pins.get(weights.version, 0) + 1}

    def unpin(self, version: int) -> None:
        """Take one pin back; the version is kept until it is dropped."""
        pins = {**self.pins, version: self.pins.get(version, 0) - 1}
        self.pins = {kept: count for kept, count in pins.items() if count > 0}


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# An element comes as an index of 8 bytes and a value of 2 to 8. From one changed element in 8
# on, a whole new tensor is no larger than the update's part of it, and costs no pause.
_WHOLE_FROM = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scatter:
    """New values of some elements of a live tensor, and the way back.

    Attributes:
        name: Canonical.
        target: The live tensor, contiguous.
        indices: i64[n] of the flattened target, each once.
        new: Bits, iN[n] of the size of the target's elements.
        old: Bits, iN[n], that the target had there.
    """

    name: str
    target: torch.Tensor
    indices: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A version that can go live.

    Attributes:
        weights: All of it, once the scatters are applied.
        scatters: What is still to write.
    """

    weights: Weights
    scatters: tuple[Scatter, ...] = ()

    def would_change(self, others: Collection[Weights]) -> bool:
        """Return whether a scatter writes to a tensor that other weights share."""
        return any(_is_shared(each.name, each.target, others) for each in self.scatters)

    def apply(self) -> None:
        """Write all scatters; on an error some are written, and `revert` undoes them."""
        for scatter in self.scatters:
            _bits(scatter.target).scatter_(0, scatter.indices, scatter.new)
        self._finish()

    def revert(self) -> None:
        """Restore what was live, bit for bit, however far `apply` came."""
        for scatter in self.scatters:
            _bits(scatter.target).scatter_(0, scatter.indices, scatter.old)
        self._finish()

    def _finish(self) -> None:
        if any(scatter.target.is_cuda for scatter in self.scatters):
            torch.cuda.synchronize()


def stage(
    update: WeightUpdate, slots: Slots, base: Weights | None, *, kept: Collection[Weights] = ()
) -> Staged:
    """Make what an update needs to go live, beside the version that serves.

    Nothing live is written to. The result may read the arrays of the update until it is live.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor that does not fit; nothing changed.
    """
    try:
        return _staged(update, slots, _base_tensors(update, base), kept)
    except (RuntimeError, MemoryError) as error:
        raise apply_failed(f"version {update.version} cannot be staged: {error}") from error


def _staged(
    update: WeightUpdate, slots: Slots, base: Mapping[str, torch.Tensor], kept: Collection[Weights]
) -> Staged:
    whole: dict[str, torch.Tensor] = {}
    scatters: dict[str, Scatter] = {}
    for part in update.tensors:
        name, indices = slots.canonical(part.spec.name), part.indices
        if name is None:
            raise apply_failed(f"the model has no tensor {part.spec.name}")
        if name in whole or name in scatters:
            raise apply_failed(f"{part.spec.name} comes twice, or is tied to {name}")
        like = slots.like(name)
        check_part(part, tuple(like.shape))
        if not like.is_floating_point():
            raise apply_failed(f"{part.spec.name} is no tensor of floats in the model")
        if indices is None:
            # A tensor of its own: the caller goes on to change its arrays.
            values = _values(part).to(device=like.device, dtype=like.dtype, copy=True)
            whole[name] = values.reshape(like.shape)
            continue
        if name not in base:
            raise apply_failed(f"{part.spec.name} is sparse, and there is no base to change")
        live = base[name]
        places = _as_tensor(indices.astype(np.int64, copy=False)).to(live.device)
        new = _bits(_values(part).to(device=live.device, dtype=live.dtype))
        is_whole = _WHOLE_FROM * len(indices) >= part.spec.element_count
        if is_whole or not slots.is_direct or _is_shared(name, live, kept):
            whole[name] = live.clone(memory_format=torch.contiguous_format)
            _bits(whole[name]).scatter_(0, places, new)
        else:
            old = _bits(live).index_select(0, places)
            scatters[name] = Scatter(name=name, target=live, indices=places, new=new, old=old)
    weights = slots.completed(update.version, {**base, **whole})
    return Staged(weights=weights, scatters=tuple(scatters.values()))


def _base_tensors(update: WeightUpdate, base: Weights | None) -> Mapping[str, torch.Tensor]:
    """Return what the update changes; bits are absolute, so a version may come again."""
    if update.base_version is None:
        return {}
    if base is None or base.version not in (update.base_version, update.version):
        live = None if base is None else base.version
        raise apply_failed(f"version {update.version} changes {update.base_version}, not {live}")
    return base.tensors


def _is_shared(name: str, tensor: torch.Tensor, others: Collection[Weights]) -> bool:
    return any(other.tensors[name] is tensor for other in others)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view as integers: torch may turn one NaN into another as it copies floats."""
    return tensor.view(-1).view(_BITS[tensor.itemsize])


def _values(part: TensorUpdate) -> torch.Tensor:
    bits = part.values.reshape(-1)
    return _as_tensor(bits.view(f"<i{bits.itemsize}")).view(TORCH_TYPES[part.spec.dtype])


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array; a copy only where torch could not write to it."""
    return torch.as_tensor(np.require(array, requirements=("C", "W")))
