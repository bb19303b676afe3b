"""Tensors to publish: numpy, torch, DTensor and what gives itself as either, read range by range.

No second model is in memory. What reads a model's parameters is kept from version to version.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import local
from time import perf_counter
from typing import Any, Final, Protocol, cast

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkRange
from astraflow.codec.float_bits import round_bf16
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, TensorSpec
from astraflow.weights.patches.layouts import Shard, ShardLayout


class ReadBits(Protocol):
    """Reads the bits of one tensor."""

    def __call__(self, start: int, stop: int, into: np.ndarray | None = None, /) -> np.ndarray:
        """Return the bits of elements: uN[n].

        Those that do not lie in memory as they are wanted may be put `into` uN[n].
        """
        ...


# Names of types in torch and ml_dtypes, where they are not numpy's.
_NAMES: Final = {
    "bfloat16": Dtype.BF16,
    "float16": Dtype.F16,
    "float32": Dtype.F32,
    "float64": Dtype.F64,
    "float8_e4m3fn": Dtype.F8_E4M3,
    "float8_e5m2": Dtype.F8_E5M2,
    "bool": Dtype.BOOL,
    **{f"int{8 * n}": Dtype(f"i{8 * n}") for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": Dtype(f"u{8 * n}") for n in (1, 2, 4, 8)},
}

TORCH_NAMES: Final = {dtype: name for name, dtype in _NAMES.items()}
"""What a type is called in torch."""

# What torch may round to while it exports.
_ROUNDED: Final = {Dtype.BF16, Dtype.F16, Dtype.F32}


def dtype_of(array: Any) -> Dtype | None:
    """Return the type of what `reader_of` takes; None: it cannot be published."""
    return _NAMES.get(_name(array.dtype))


def can_round(array: Any, dtype: Dtype) -> bool:
    """Whether a torch tensor is rounded to a type on the way, or has it."""
    is_float = _is_torch(array) and array.is_floating_point()
    return is_float and (dtype in _ROUNDED or dtype_of(array) is dtype)


def reader_of(array: Any, spec: TensorSpec, shard: Shard) -> ReadBits:
    """Return what reads a shard's part of one tensor, without a copy of it where that can be.

    Args:
        array: The shard's part, or the whole tensor, of which the part is taken: a numpy array
            (bits as unsigned integers, or of the tensor's own type), a torch tensor on any device,
            a DTensor that is sharded by rows, or what `numpy.from_dlpack` or `numpy.asarray` takes.
            A torch tensor of another float type than the layout's is rounded to nearest, range by
            range.
        spec: Of the whole tensor.
        shard: Whose part.

    Raises:
        AstraflowError: LAYOUT_MISMATCH naming the tensor.
    """
    local = local_part(array, spec)
    shape = tuple(local.shape) if hasattr(local, "shape") else ()
    if shape != spec.shape and shape != shard.shape(spec):
        raise _mismatch(spec, f"has the shape {list(shape)}", f"{list(shard.shape(spec))}")
    read = _torch_reader(local, spec) if _is_torch(local) else _numpy_reader(local, spec)
    if shape != spec.shape or not shape or shard.count == 1:
        return read
    first = shard.rows(spec).start * (spec.element_count // max(spec.shape[0], 1))
    return lambda start, stop, into=None: read(first + start, first + stop, into)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def local_part(array: Any, spec: TensorSpec) -> Any:
    """Return what of a DTensor lies here; anything else but torch tensors as a numpy array."""
    if isinstance(array, np.ndarray) or _is_plain(array):
        return cast("Any", array)
    if hasattr(array, "to_local"):
        for place in array.placements:
            if not (place.is_shard(0) or place.is_replicate()):
                raise _mismatch(spec, f"is placed as {place}", "shards of rows; redistribute it")
        return array.to_local()
    if _is_torch(array):
        return array
    if hasattr(array, "__array__"):
        return np.asarray(array)
    try:
        given: Any = np.from_dlpack(array)
    except (TypeError, AttributeError, BufferError, RuntimeError) as error:
        raise _mismatch(spec, f"is a {type(array).__name__}", f"an array: {error}") from None
    return given


def _numpy_reader(array: np.ndarray, spec: TensorSpec) -> ReadBits:
    name = array.dtype.name
    if array.dtype != spec.dtype.bits and _NAMES.get(name) is not spec.dtype:
        raise _mismatch(spec, f"is {name}", f"{spec.dtype} or its bits, {spec.dtype.bits}")
    if array.dtype.byteorder == ">":
        raise _mismatch(spec, "is big-endian", "the bytes of an element in little-endian order")
    if array.flags.c_contiguous:
        bits = array.reshape(-1).view(spec.dtype.bits)
        return lambda start, stop, _=None: bits[start:stop]
    return lambda start, stop, _=None: array.flat[start:stop].view(spec.dtype.bits)


def _torch_reader(tensor: Any, spec: TensorSpec) -> ReadBits:
    known = dtype_of(tensor)
    is_rounded = (
        known is not spec.dtype and spec.dtype in _ROUNDED and tensor.dtype.is_floating_point
    )
    is_bits = _name(tensor.dtype) == _name(spec.dtype.bits)
    if known is not spec.dtype and not is_rounded and not is_bits:
        raise _mismatch(spec, f"is {tensor.dtype}", f"{spec.dtype}")
    if _is_plain(tensor):
        if not is_rounded:
            bits = np.asarray(_Memory(tensor, spec.dtype.bits))
            return lambda start, stop, _=None: bits[start:stop]
        if (known, spec.dtype) == (Dtype.F32, Dtype.BF16):
            values = np.asarray(_Memory(tensor, Dtype.F32.numpy))

            def rounded(start: int, stop: int, into: np.ndarray | None = None, /) -> np.ndarray:
                bits = np.empty(stop - start, np.uint16) if into is None else into
                round_bf16(values[start:stop], bits)
                return bits

            return rounded
    torch = sys.modules["torch"]
    wanted = getattr(torch, TORCH_NAMES[spec.dtype])
    flat = tensor.detach().reshape(-1)
    beside = _beside(tensor.device)

    def read(start: int, stop: int, into: np.ndarray | None = None, /) -> np.ndarray:
        with beside():
            part = flat[start:stop]
            if is_rounded and into is not None:
                torch.from_numpy(into.view(np.uint8)).view(wanted).copy_(part)
                return into
            part = part.to(device="cpu", dtype=wanted) if is_rounded else part.cpu()
        return part.contiguous().view(torch.uint8).numpy().view(spec.dtype.bits)

    return read


def _beside(device: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what has copies from a GPU not wait for the steps that were queued after this call."""
    if device.type != "cuda":
        return nullcontext
    cuda, stream = sys.modules["torch"].cuda, _side_stream(device)
    stream.wait_stream(cuda.current_stream(device))
    return lambda: cuda.stream(stream)


@cache
def _side_stream(device: Any) -> Any:
    return sys.modules["torch"].cuda.Stream(device)


class _Memory:
    """What numpy asks for the memory of a tensor.

    Every call to torch lets another thread have the interpreter, which takes longer than the
    reading of a small tensor.
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.numel(),),
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), True),
        }


def _is_plain(array: Any) -> bool:
    """Whether it is a tensor of torch with elements in this machine's memory, in their order."""
    torch = sys.modules.get("torch")
    if torch is None or type(array) not in (torch.nn.Parameter, torch.Tensor):
        return False
    return array.is_cpu and array.is_contiguous() and array.numel() > 0


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _mismatch(spec: TensorSpec, found: str, wanted: str) -> AstraflowError:
    return AstraflowError(
        Reason.LAYOUT_MISMATCH, f"tensor {spec.name} {found}; the layout needs {wanted}"
    )


class Reads:
    """Makes what reads tensors, once for a parameter that lies where it lay before."""

    def __init__(self, part: ShardLayout) -> None:
        self._part = part
        # The parameter, where it lay, and what reads it there.
        self._kept: dict[str, tuple[Any, tuple[Any, ...], ReadBits]] = {}

    def of(self, tensors: Mapping[str, Any]) -> dict[str, ReadBits]:
        """Check names, shapes and types; nothing is read yet."""
        by_name = self._part.layout.by_name
        if tensors.keys() != by_name.keys():
            names = sorted(tensors.keys() ^ by_name.keys())
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH, f"tensors and layout differ in {', '.join(names[:5])}"
            )
        return {name: self._reader(tensors[name], spec) for name, spec in by_name.items()}

    def _reader(self, tensor: Any, spec: TensorSpec) -> ReadBits:
        kept, torch = self._kept.pop(spec.name, None), sys.modules.get("torch")
        if torch is None or type(tensor) is not torch.nn.Parameter or not _is_plain(tensor):
            return reader_of(tensor, spec, self._part.shard)
        # Unlike other tensors a parameter of torch is there for many versions; what reads one that
        # is not contiguous reads a copy, of this version alone.
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if kept is None or kept[0] is not tensor or kept[1] != place:
            kept = (tensor, place, reader_of(tensor, spec, self._part.shard))
        self._kept[spec.name] = kept
        return kept[2]


class Exported:
    """What a publisher was given.

    Attributes:
        gather_s: Seconds that reading took so far, of all threads together.
    """

    def __init__(self, part: ShardLayout, reads: Mapping[str, ReadBits]) -> None:
        self.gather_s = 0.0
        self._rooms = local()
        self._reads = reads
        self._part = part

    def bits(self, where: ChunkRange) -> np.ndarray:
        """Return the bits of a range, uN[element_count]: valid until this thread's next call.

        They are a view where the range lies in one tensor.
        """
        started = perf_counter()
        bits = self._gathered(where)
        self.gather_s += perf_counter() - started
        return bits

    def _gathered(self, where: ChunkRange) -> np.ndarray:
        if not hasattr(self._rooms, "room"):
            self._rooms.room = np.empty(CHUNK_NBYTES, np.uint8)
        room: np.ndarray = self._rooms.room[: where.nbytes].view(where.dtype.bits)
        done = 0
        for piece, here, of_piece in self._part.parts(where):
            found = self._reads[piece.spec.name](of_piece.start, of_piece.stop, room[here])
            if len(found) == len(room):
                # A view of what was given, perhaps, which is nobody's to write to.
                return found
            if found.base is not room.base:
                room[here] = found
            room[done : here.start] = 0
            done = here.stop
        room[done:] = 0
        return room
