"""Devices: where each of a node's servers computes, and whether there is room for all of them."""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

import psutil

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason

_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def is_on_cpu(settings: EngineSettings) -> bool:
    """Return whether a recipe's server is for a CPU; auto: where no GPU's driver is."""
    if settings.device != "auto":
        return settings.device == "cpu"
    return not has_gpus()


def has_gpus() -> bool:
    return any(device.exists() for device in _GPUS)


def computed_dtype(settings: EngineSettings, named: str | None) -> Literal["f32", "bf16"]:
    """Return what an engine computes in.

    Args:
        settings: Of the recipe.
        named: The type of the model in its config, as torch names it; None: of f32, as
            transformers has it.

    Example:
        Of a model in float16 it is bf16, unless the recipe says f32.
    """
    if settings.dtype != "auto":
        return settings.dtype
    return "f32" if named in (None, "float32", "float64") else "bf16"


_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")

_GROUPS = Path("/sys/fs/cgroup")

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

# What servers take of a GPU when nobody says.
_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to share.

    Attributes:
        gpus: As `CUDA_VISIBLE_DEVICES` names them; empty: none, or not known.
        has_gpus: Whether there is a driver of any.
        free_nbytes: Memory that processes can have; None: not known.
        gpu_nbytes: Memory of a GPU, of several that of the smallest; 0: not known.
    """

    gpus: tuple[str, ...] = ()
    has_gpus: bool = False
    free_nbytes: int | None = None
    gpu_nbytes: int = 0

    @classmethod
    def here(cls) -> "Machine":
        sizes = _gpu_sizes()
        return cls(
            gpus=_gpus_here(len(sizes)),
            has_gpus=has_gpus(),
            free_nbytes=free_memory(),
            gpu_nbytes=min(sizes, default=0),
        )


def place_engines(
    settings: EngineSettings, directories: Sequence[Path], machine: Machine
) -> Sequence[EngineSettings]:
    """Return the settings of each of a node's engines; servers get GPUs of their own, or a share.

    Raises:
        AstraflowError: INVALID_FIELD when settings cannot be those of so many servers,
            MEMORY_EXCEEDED when they would not fit.

    Example:
        Three servers of two GPUs each where there are four: the first and the third share a pair,
        so each of these gets .45 of its memory.
    """
    count = len(directories)
    if not settings.is_server:
        return [settings] * count
    if settings.url is not None:
        if count > 1:
            raise _invalid_setting(
                f"url {settings.url} is one server, and the policies need {count}, as each has"
                " weights of its own: leave it out, run one policy per node, or adapt one model"
                " (model.lora)"
            )
        return [settings]
    if settings.device == "cpu" or not machine.has_gpus:
        _require_memory(settings, directories, machine)
        return [settings] * count
    return _on_gpus(settings, count, machine.gpus)


def visible_gpus(settings: EngineSettings, machine: Machine) -> Mapping[str, str]:
    """Return what a server's environment says of the GPUs that it was placed on."""
    kind, _, first = settings.device.partition(":")
    if kind != "cuda" or not first.isdecimal() or not machine.gpus:
        return {}
    start = int(first)
    return {VISIBLE: ",".join(machine.gpus[start : start + settings.tensor_parallel])}


def _on_gpus(settings: EngineSettings, count: int, gpus: Sequence[str]) -> Sequence[EngineSettings]:
    if not gpus or settings.device != "auto":
        return [settings] * count
    width = settings.tensor_parallel
    if width > len(gpus):
        raise _invalid_setting(
            f"tensor_parallel {width} needs as many GPUs, and there are {len(gpus)}"
        )
    place_count = len(gpus) // width
    shares = [_share(settings, index, count, place_count) for index in range(count)]
    return [
        settings.model_copy(
            update={"device": f"cuda:{index % place_count * width}", "memory": share}
        )
        for index, share in enumerate(shares)
    ]


def _share(settings: EngineSettings, index: int, count: int, place_count: int) -> float | None:
    """Return what a server may have of its GPUs' memory; None: as if it were alone."""
    here = len(range(index % place_count, count, place_count))
    if settings.memory is not None and settings.memory * here > 1:
        raise _invalid_setting(
            f"memory {settings.memory} for each of {here} servers on one GPU is more than there"
            f" is: at most {1 / here:.2f}, or leave it out"
        )
    return settings.memory if settings.memory is not None or here == 1 else _SHARE / here


def _require_memory(
    settings: EngineSettings, directories: Sequence[Path], machine: Machine
) -> None:
    """Reject what cannot fit: models and caches alone, without what a process takes."""
    needed = sum(
        sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        + settings.cache_gib * 2**30
        for directory in directories
    )
    if machine.free_nbytes is not None and needed > machine.free_nbytes:
        raise AstraflowError(
            Reason.MEMORY_EXCEEDED,
            f"{len(directories)} servers of kind {settings.kind} need {needed / 2**30:.1f} GiB for"
            f" models and caches, and {machine.free_nbytes / 2**30:.1f} are free: lower"
            " raas.engine.cache_gib, or run one policy per node",
        )


def _gpus_here(count: int) -> tuple[str, ...]:
    """Return what may be used of so many GPUs; CUDA takes those before the first that is none."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [each.strip() for each in named.split(",")]
        return tuple(takewhile(lambda each: each not in ("", "-1"), names))
    if not count and _GPU_FOLDER.is_dir():
        count = len(list(_GPU_FOLDER.iterdir()))
    return tuple(map(str, range(count)))


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def _gpu_sizes() -> list[int]:
    """Return the memory of each GPU of this machine, as NVML says; empty: it is not here.

    No context is made on any of them, as CUDA would.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, sizes = ctypes.c_uint(), list[int]()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            return []
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return []
        sizes.append(memory.total)
    nvml.nvmlShutdown()
    return sizes


def free_memory() -> int:
    """Return how many bytes this process can have: of the machine, a container's limit, a job's."""
    left = [left for _, left in limits_of_groups(_GROUPS, _own_groups())]
    return min([psutil.virtual_memory().available, *left])


def whole_memory() -> int:
    """Return how many bytes there are for this process and what it shares a limit with."""
    most = [most for most, _ in limits_of_groups(_GROUPS, _own_groups())]
    return min([psutil.virtual_memory().total, *most])


def _own_groups() -> str:
    said = Path("/proc/self/cgroup")
    return said.read_text() if said.is_file() else ""


def limits_of_groups(root: Path, places: str) -> Iterator[tuple[int, int]]:
    """Yield each limit of some control groups, and what it leaves.

    What files alone hold counts as free.

    Args:
        root: Where the groups are mounted.
        places: What /proc/self/cgroup says; a container's own group may be the root itself.
    """
    for line in places.splitlines():
        _, kinds, place = line.split(":", 2)
        top, names = root, ("memory.max", "memory.current", "inactive_file")
        if "memory" in kinds.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif kinds:
            continue
        limit, used, unused = names
        group = top / place.lstrip("/")
        for folder in (each for each in (group, *group.parents) if each.is_relative_to(top)):
            # There is none ("max"), or no such file.
            with suppress(OSError, ValueError):
                most, taken = (int((folder / name).read_text()) for name in (limit, used))
                lines = (folder / "memory.stat").read_text().splitlines()
                stat = dict(line.split(" ", 1) for line in lines)
                yield most, max(0, most - taken + int(stat.get(unused, 0)))


def _invalid_setting(message: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, f"raas.engine: {message}")
