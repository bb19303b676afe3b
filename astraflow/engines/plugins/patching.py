"""Patches: an update written into the live parameters of a server, and read back.

What does not need the pause is staged: places are looked up, values converted and pieces cut. To
apply is one `scatter_` per piece of what changes, or one copy per region of a tensor that comes
whole. So the bytes that a patch touches grow with what changes and not with the model. Most of
that time is spent on waiting for memory, a cache line per element, so several threads share it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from .exchange import TensorPart, Update
from .regions import Loader, Parameters, Region, find_regions

_TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}
# Each element may lie in a cache line of its own: 64 bytes times this is half a megabyte.
_PIECE = 8192
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PatchError(Exception):
    """An update that does not fit; it names the tensor. Nothing was written, unless it says so."""


@dataclass(frozen=True)
class Write:
    """Elements of a parameter to write: one by one, or a part of it as a whole.

    Attributes:
        target: Bits of it, iN; flat where there are places.
        values: Bits, iN, as many as are written; of a whole part on any device.
        places: i64[n] in the target; None: all of it.
    """

    target: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor | None = None

    def pieces(self) -> "Iterator[Write]":
        """Return parts that a core's cache holds while they are read back; on a device, itself."""
        if self.places is None or self.target.device.type != "cpu":
            yield self
            return
        for start in range(0, len(self.places), _PIECE):
            part = slice(start, start + _PIECE)
            yield Write(self.target, self.values[part], self.places[part])

    def apply(self) -> int:
        """Write; return the bytes written."""
        if self.places is None:
            self.target.copy_(self.values)
        else:
            self.target.scatter_(0, self.places, self.values)
        return self.values.nbytes

    def is_written(self) -> bool:
        found = self.target if self.places is None else self.target.gather(0, self.places)
        return torch.equal(found, self.values.to(found.device))


@dataclass(frozen=True)
class StagedUpdate:
    """An update that can be written.

    Attributes:
        version: What the weights are afterwards.
        unmapped: Tensors that the server's own loader must load, with all that they are fused with.
    """

    version: int
    writes: tuple[Write, ...]
    unmapped: tuple[str, ...]


class Patcher:
    """Writes updates into one model.

    Attributes:
        regions: Where the tensors seen so far lie.
    """

    def __init__(self, parameters: Parameters, load: Loader) -> None:
        """Watch no loader before the first update shows what there is."""
        self._load = load
        self._parameters = parameters
        self.regions: dict[str, tuple[Region, ...]] = {}
        self._seen: dict[str, tuple[int, ...]] = {}

    def stage(self, update: Update) -> StagedUpdate:
        """Look up what an update writes where; nothing is written.

        Raises:
            PatchError: It changes some elements of a tensor that has no place of its own.
        """
        self._learn(update)
        unmapped = tuple(part.name for part in update.parts if part.name not in self.regions)
        if unmapped and update.base_version is not None:
            raise PatchError(f"{unmapped[0]} is not simply copied by the server's loader")
        writes = tuple(
            piece
            for part in update.parts
            for region in self.regions.get(part.name, ())
            for piece in self._write(part, region).pieces()
        )
        return StagedUpdate(version=update.version, writes=writes, unmapped=unmapped)

    def holders(self, sample: Update) -> frozenset[str]:
        """Return the parameters in which some elements of what was loaded lie where it was copied.

        Elements that are all alike say nothing.
        """
        self._learn(sample)
        right, wrong = set[str](), set[str]()
        for part in sample.parts:
            for region in self.regions.get(part.name, ()):
                write = self._write(part, region)
                if not write.is_written():
                    wrong.add(region.parameter)
                elif bool((write.values != write.values[:1]).any()):
                    right.add(region.parameter)
        return frozenset(right - wrong)

    def _learn(self, update: Update) -> None:
        """Watch the loader with tensors that were not seen before."""
        new = {p.name: p for p in update.parts if self._seen.get(p.name) != p.shape}
        for dtype in {part.dtype for part in new.values()}:
            shapes = {name: part.shape for name, part in new.items() if part.dtype == dtype}
            self.regions |= find_regions(self._load, self._parameters, shapes, _TORCH[dtype])
            self._seen |= shapes

    def _write(self, part: TensorPart, region: Region) -> Write:
        parameter = self._parameters.flat[region.parameter]
        flat, values = _bits(parameter), _bits(values_of(part).to(parameter.dtype))
        if part.indices is None:
            return Write(region.target.on(flat), region.source.on(values))
        taken, places = region.places(torch.as_tensor(part.indices))
        return Write(flat, values[taken].to(flat.device), places.to(flat.device))


def apply(staged: StagedUpdate) -> dict[str, Any]:
    """Write an update and read it back, piece by piece: what was just written is in the cache.

    Returns:
        The version of the weights now, `nbytes` written, and `apply_s`, seconds for it, with
        reading it back.

    Raises:
        PatchError: What was read is not what was written: the weights are of no version.
    """
    started = perf_counter()
    # A copy of a whole part is shared among threads by torch.
    nbytes = sum(_written(each) for each in staged.writes if each.places is None)
    nbytes += _all_written([each for each in staged.writes if each.places is not None])
    return {"version": staged.version, "nbytes": nbytes, "apply_s": perf_counter() - started}


def _all_written(scatters: list[Write]) -> int:
    """Write pieces on as many threads as torch would use; torch lets go of Python's lock."""
    if not scatters or scatters[0].target.device.type != "cpu":
        return sum(map(_written, scatters))
    left, count, mode = iter(scatters), torch.get_num_threads(), torch.is_inference_mode_enabled()

    def write(_: int) -> int:
        with torch.inference_mode(mode):
            return sum(map(_written, left))

    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(write, range(count)))


def _written(write: Write) -> int:
    nbytes = write.apply()
    if not write.is_written():
        raise PatchError("what was written is not there: the weights are of no version")
    return nbytes


def values_of(part: TensorPart) -> torch.Tensor:
    """Return the values of a part, flat; no copy."""
    signed = part.values.view(f"<i{part.values.itemsize}")
    return torch.as_tensor(signed).view(_TORCH[part.dtype])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers of the same bits: torch may turn one NaN into another as it copies."""
    return tensor.view(_BITS[tensor.element_size()])
