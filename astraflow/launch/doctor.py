"""What works on this machine, and what to do about what does not."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from astraflow import __version__
from astraflow.codec import kernels
from astraflow.config.extras import install, install_server
from astraflow.engines.devices import free_memory
from astraflow.engines.served.exchange import SHARED_MEMORY
from astraflow.storage.cache import cache_dir

_GIB = 1 << 30
_MIB = 1 << 20
# One connection's part of twice what is on its way at 4 Gbit/s x 300 ms: docs/lanes.md, TCP.
_FAR_NBYTES = 2 * 150_000_000 // 96
_TCP = Path("/proc/sys/net/ipv4")
_NEEDED = ("grpcio", "protobuf", "numpy", "zstandard", "blake3", "pydantic")

_Seen = tuple[str, bool | None, str, str]
"""Name, whether it works, what was found and what to do about it, of one check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """One finding.

    Attributes:
        area: versions, machine, ports, devices, lanes or engines.
        name: What was looked at.
        works: None: not needed by default, and not there.
        found: What was found.
        advice: What to do about it; empty when nothing.
    """

    area: str
    name: str
    works: bool | None
    found: str
    advice: str = ""


def examine() -> Iterator[DoctorCheck]:
    """Look at everything a run needs, cheap things first."""
    looks = {
        "versions": _versions,
        "machine": _machine,
        "ports": _ports,
        "devices": _devices,
        "lanes": _lanes,
        "engines": _engines,
    }
    for area, look in looks.items():
        for name, works, found, advice in look():
            yield DoctorCheck(area=area, name=name, works=works, found=found, advice=advice)


def _versions() -> Iterator[_Seen]:
    is_new = sys.version_info >= (3, 11)
    cure = "" if is_new else "install Python 3.11 or later"
    yield "python", is_new, platform.python_version(), cure
    yield "astraflow", True, __version__, ""
    for name in _NEEDED:
        if found := _release(name):
            yield name, True, found, ""
        else:
            cure = "install astraflow again: this package belongs to it"
            yield name, False, "missing", cure


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[_Seen]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", True, str(cores), ""
    memory, disk = free_memory(), shutil.disk_usage(Path.cwd()).free
    for name, free, wanted, cure in (
        ("memory", memory, 4 * _GIB, "close other programs: a small run takes 4 GiB"),
        ("disk here", disk, 2 * _GIB, "free some space, or give --runs another folder"),
    ):
        yield name, free >= wanted, f"{free / _GIB:.1f} GiB free", "" if free >= wanted else cure
    cache = cache_dir()
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    is_writable = os.access(cache, os.W_OK)
    cure = "" if is_writable else "point XDG_CACHE_HOME at a folder that you can write"
    yield "cache", is_writable, str(cache), cure
    if SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(SHARED_MEMORY).total
        cure = "docker run --shm-size or --ipc=host: vLLM, SGLang and NCCL need it"
        is_small = total < _GIB
        found = f"{total / _GIB:.2f} GiB in {SHARED_MEMORY}"
        yield "shared memory", None if is_small else True, found, cure if is_small else ""
    level = kernels.level()
    if level is not kernels.KernelLevel.NUMPY:
        yield "weight codec", True, f"compiled, {level.name.lower()}", ""
    else:
        cure = "install a C compiler and astraflow again, or unset ASTRAFLOW_KERNELS"
        yield "weight codec", None, "numpy, about 30 times slower", cure


def _ports() -> Iterator[_Seen]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
    except OSError as error:
        cure = "allow connections on 127.0.0.1: the processes of a run meet there"
        yield "loopback", False, str(error), cure
    else:
        yield "loopback", True, f"port {port} opened and dialled", ""


def _devices() -> Iterator[_Seen]:
    if find_spec("torch") is None:
        yield "torch", False, "missing", install("torch")
        return
    import torch  # noqa: PLC0415 - slow to import, an extra

    yield "torch", True, torch.__version__, ""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(names) or "none: everything runs on the CPU"
    yield "GPU", True if names else None, found, ""


def _lanes() -> Iterator[_Seen]:
    yield "grpc", True, "always there", ""
    yield _tcp_lane()
    if hasattr(os, "memfd_create") and os.access(tempfile.gettempdir(), os.W_OK):
        yield "shm", True, tempfile.gettempdir(), ""
    else:
        yield "shm", None, "missing", "on Linux, point TMPDIR at a folder that you can write"
    if ucx := _release("ucxx-cu12") or _release("ucx-py-cu12"):
        yield "ucx", True, f"ucxx {ucx}", ""
    else:
        yield "ucx", None, "missing", f"{install('ucx')}, for fabrics that UCX knows"
    if release := _release("fsspec"):
        yield "object store", True, f"fsspec {release}", ""
    else:
        yield "object store", None, "missing", f"{install('store')}, if versions go by a bucket"


def _tcp_lane() -> _Seen:
    """Say how much a connection may have on its way; far links are slow where that is little."""
    try:
        room = min(int((_TCP / name).read_text().split()[-1]) for name in ("tcp_rmem", "tcp_wmem"))
    except (OSError, ValueError, IndexError):
        return "tcp", True, "buffers as the system has them", ""
    advice = "across oceans, raise the maxima of net.ipv4.tcp_rmem and tcp_wmem: docs/lanes.md"
    found = f"buffers up to {room / _MIB:.0f} MiB a connection"
    return "tcp", True, found, "" if room >= _FAR_NBYTES else advice


def _engines() -> Iterator[_Seen]:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        yield "embedded", False, f"missing {', '.join(missing)}", install("torch")
    else:
        yield "embedded", True, "torch and transformers are there", ""
    for kind in ("vllm", "sglang"):
        variable = f"ASTRAFLOW_{kind.upper()}_PYTHON"
        named = os.environ.get(variable)
        works = None if named is None else os.access(named, os.X_OK)
        cure = "" if works else f"set {variable}, or: {install_server(kind)}"
        yield kind, works, f"{variable} is {named or 'not set'}", cure
