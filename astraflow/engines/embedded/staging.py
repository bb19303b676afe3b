"""Staging: what an update needs is made beside generation, so that its commit is short.

Of a tensor of which little changes, the new values are scattered into the live tensor between
two decode steps; the old ones, gathered before, undo it. A tensor of which much changes, or
which a version that can still be asked for shares, is written anew beside the live one, and the
commit points the parameter at it. So the pause is O(elements scattered); the extra memory is at
most that of the update, except while an older version is kept, which then keeps its bits.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from astraflow.core.tensors import Dtype, TensorUpdate, WeightUpdate
from astraflow.engines.checks import apply_failed, check_part
from astraflow.engines.embedded.weights import Slots, Weights

_TORCH = {
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.F32: torch.float32,
    Dtype.F64: torch.float64,
}
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

    def apply(self) -> None:
        """Write the new values."""
        _bits(self.target).scatter_(0, self.indices, self.new)

    def revert(self) -> None:
        """Write the old values, whether or not the new ones were written."""
        _bits(self.target).scatter_(0, self.indices, self.old)


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
            scatter.apply()
        self._finish()

    def revert(self) -> None:
        """Restore what was live, bit for bit, however far `apply` came."""
        for scatter in self.scatters:
            scatter.revert()
        self._finish()

    def _finish(self) -> None:
        if any(scatter.target.is_cuda for scatter in self.scatters):
            torch.cuda.synchronize()


def stage(
    update: WeightUpdate, slots: Slots, base: Weights | None, *, kept: Collection[Weights] = ()
) -> Staged:
    """Make what an update needs to go live, beside the version that serves.

    Nothing live is written to. The result may read the arrays of the update until it is live.

    Args:
        update: Verified.
        slots: Of the model.
        base: The live state.
        kept: Versions whose tensors have to stay as they are.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor that does not fit; nothing changed.
    """
    try:
        return _Staging(update, slots, base, kept).result()
    except (RuntimeError, MemoryError) as error:
        raise apply_failed(f"version {update.version} cannot be staged: {error}") from error


def bits_of(tensor: torch.Tensor, dtype: Dtype) -> np.ndarray:
    """Return a copy of a tensor's bits in another type, uN[element_count].

    A value that came as `dtype` and is computed with as a wider type comes back as it was,
    unless it is not a number.
    """
    values = tensor.to(device="cpu", dtype=_TORCH[dtype], copy=True)
    signed: np.ndarray = _bits(values).numpy()
    return signed.view(dtype.bits)


class _Staging:
    def __init__(
        self, update: WeightUpdate, slots: Slots, base: Weights | None, kept: Collection[Weights]
    ) -> None:
        self._update = update
        self._slots = slots
        self._base = dict(_base_tensors(update, base))
        self._kept = kept
        self._whole: dict[str, torch.Tensor] = {}
        self._scatters: dict[str, Scatter] = {}

    def result(self) -> Staged:
        for part in self._update.tensors:
            self._add(part)
        tensors = {**self._base, **self._whole}
        return Staged(
            weights=self._slots.completed(self._update.version, tensors),
            scatters=tuple(self._scatters.values()),
        )

    def _add(self, part: TensorUpdate) -> None:
        name = self._slots.canonical(part.spec.name)
        if name is None:
            raise apply_failed(f"the model has no tensor {part.spec.name}")
        if name in self._whole or name in self._scatters:
            raise apply_failed(f"{part.spec.name} comes twice, or is tied to {name}")
        like = self._slots.like(name)
        check_part(part, tuple(like.shape))
        if not like.is_floating_point():
            raise apply_failed(f"{part.spec.name} is no tensor of floats in the model")
        if part.indices is None:
            self._whole[name] = _whole(part, like)
        else:
            self._change(name, part, part.indices)

    def _change(self, name: str, part: TensorUpdate, indices: np.ndarray) -> None:
        if name not in self._base:
            raise apply_failed(f"{part.spec.name} is sparse, and there is no base to change")
        live = self._base[name]
        places = _tensor(indices.astype(np.int64, copy=False)).to(live.device)
        new = _bits(_values(part).to(device=live.device, dtype=live.dtype))
        is_whole = _WHOLE_FROM * len(indices) >= part.spec.element_count
        if is_whole or not self._slots.is_direct or _is_shared(name, live, self._kept):
            self._whole[name] = live.clone(memory_format=torch.contiguous_format)
            _bits(self._whole[name]).scatter_(0, places, new)
            return
        self._scatters[name] = Scatter(
            name=name,
            target=live,
            indices=places,
            new=new,
            old=_bits(live).index_select(0, places),
        )


def _base_tensors(update: WeightUpdate, base: Weights | None) -> dict[str, torch.Tensor]:
    """Return what the update changes; bits are absolute, so a version may come again."""
    if update.base_version is None:
        return {}
    if base is None or base.version not in (update.base_version, update.version):
        live = None if base is None else base.version
        raise apply_failed(f"version {update.version} changes {update.base_version}, not {live}")
    return dict(base.tensors)


def _is_shared(name: str, tensor: torch.Tensor, others: Collection[Weights]) -> bool:
    return any(other.tensors[name] is tensor for other in others)


def _whole(part: TensorUpdate, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own: the caller goes on to change its arrays."""
    values = _values(part)
    return values.to(device=like.device, dtype=like.dtype, copy=True).reshape(like.shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view as integers: torch may turn one NaN into another as it copies floats."""
    return tensor.view(-1).view(_BITS[tensor.itemsize])


def _values(part: TensorUpdate) -> torch.Tensor:
    bits = part.values.reshape(-1)
    return _tensor(bits.view(f"<i{bits.itemsize}")).view(_TORCH[part.spec.dtype])


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array; a copy only where torch could not write to it."""
    return torch.as_tensor(np.require(array, requirements=("C", "W")))
