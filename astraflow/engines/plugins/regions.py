"""Regions: where the elements of a checkpoint's tensors lie in a server's parameters.

A server fuses and shards what a checkpoint keeps apart. Its own loader knows how, so it is
watched once: it is given tensors of the right shapes whose memory is never touched, and every
copy that it makes from one of them into a parameter is noted instead of made. A copy is a strided
view on each side, so a region is a few integers, and an element's place is arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What a loader fills up behind the last row stays as it is.
_PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True)
class View:
    """A strided part of a flat array, in elements.

    Attributes:
        offset: Of its first element.
        shape: As many entries as `strides`.
        strides: Steps between neighbours.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Return what a tensor is of its memory."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def is_flat(self) -> bool:
        """Whether its elements lie side by side, in order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat tensor: no copy."""
        return flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True)
class Region:
    """A part of a checkpoint's tensor and the part of a parameter that it is copied to.

    Attributes:
        source: In the flattened tensor of the checkpoint.
        target: In the flattened parameter; of the same shape.
    """

    parameter: str
    source: View
    target: View

    def places(self, indices: torch.Tensor) -> tuple[torch.Tensor | slice, torch.Tensor]:
        """Return which of some elements lie in this region, and where in the parameter.

        Args:
            indices: i64[n] of the flattened tensor, rising.

        Returns:
            What to take of the n, and i64[m]: their places in the flattened parameter.
        """
        if not (self.source.is_flat and self.target.is_flat):
            return self._strided(indices)
        start = self.source.offset
        bounds = torch.tensor([start, start + self.source.element_count])
        first, last = (int(bound) for bound in torch.searchsorted(indices, bounds))
        taken = slice(first, last)
        return taken, indices[taken] + (self.target.offset - start)

    def _strided(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the indices apart, widest stride first: the strides of a view are nested."""
        rest = indices - self.source.offset
        is_in = rest >= 0
        places = torch.full_like(indices, self.target.offset)
        axes = zip(self.source.strides, self.source.shape, self.target.strides, strict=True)
        for step, size, target_step in sorted(axes, reverse=True):
            if size == 1:
                continue
            at = torch.div(rest, step, rounding_mode="floor")
            is_in &= at < size
            rest = rest - at * step
            places += at * target_step
        is_in &= rest == 0
        return is_in, places[is_in]


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is equal for views of the same memory, also where it has no address."""
    memory: Any = tensor.untyped_storage()
    return memory._cdata  # noqa: SLF001


class Parameters:
    """Parameters of a model by their memory.

    Attributes:
        flat: All of the memory of each, by name; of tied ones the first name.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take note of them.

        Args:
            named: Those that are computed with as the checkpoint has them, but for their place:
                one that is packed or scaled after loading is not among them.
        """
        self.flat: dict[str, torch.Tensor] = {}
        self._by_memory: dict[int, str] = {}
        for name, parameter in named:
            memory = memory_of(parameter.data)
            if memory not in self._by_memory:
                self._by_memory[memory] = name
                data = parameter.data
                count = data.untyped_storage().nbytes() // data.element_size()
                self.flat[name] = data.as_strided((count,), (1,), 0)

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return whose memory a tensor is a view of; None: of no parameter."""
        return self._by_memory.get(memory_of(tensor))


class _Watch(TorchDispatchMode):
    """Notes copies of given tensors into parameters; what else writes to these is an error."""

    def __init__(self, parameters: Parameters, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.regions: dict[str, list[Region]] = {name: [] for name in sources}
        self._parameters = parameters
        self._names = {memory_of(tensor): name for name, tensor in sources.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func._schema.is_mutable or not isinstance(args[0], torch.Tensor):  # noqa: SLF001
            return func(*args, **(kwargs or {}))
        owner = self._parameters.owner_of(args[0])
        if owner is None:
            return func(*args, **(kwargs or {}))
        if func in _PADDING:
            return args[0]
        if func is not torch.ops.aten.copy_.default:
            raise ValueError(f"{owner} is written to by {func}")
        self._note(owner, args[0], args[1])
        return args[0]

    def _note(self, owner: str, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(memory_of(source))
        if name is None or target.dtype != self._parameters.flat[owner].dtype:
            raise ValueError(f"{owner} gets what was computed")
        view = View.of(source.expand(target.shape))
        if 0 in view.strides and not source.shape == target.shape:
            raise ValueError(f"{owner} gets elements of {name} more than once")
        self.regions[name].append(Region(owner, view, View.of(target)))


def find_regions(
    load: Loader, parameters: Parameters, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Mapping[str, tuple[Region, ...]]:
    """Watch a loader; nothing is written to the parameters.

    Returns:
        Regions by tensor; without an entry: one that the loader does not simply copy (it skips,
        quantises or computes), so its elements have no place of their own.
    """
    # Tensors without memory: a copy that escaped the watch (in a thread) would fail, not write.
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    try:
        found = _watched(load, parameters, sources)
    except Exception:  # noqa: BLE001  whatever a loader raises: one by one shows where
        found = dict[str, list[Region]]()
        for name, tensor in sources.items():
            with suppress(Exception):
                found |= _watched(load, parameters, {name: tensor})
    return {name: tuple(regions) for name, regions in found.items() if regions}


def _watched(
    load: Loader, parameters: Parameters, sources: Mapping[str, torch.Tensor]
) -> dict[str, list[Region]]:
    watch = _Watch(parameters, sources)
    with torch.no_grad(), watch:
        load(sources.items())
    return watch.regions
