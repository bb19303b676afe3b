"""What works on this machine, and what to do about what does not."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from astraflow import __version__
from astraflow.codec import kernels
from astraflow.config.extras import install, install_server
from astraflow.storage.cache import cache_dir

_GIB = 1 << 30
_MIB = 1 << 20
# One connection's part of twice what is on its way at 4 Gbit/s x 300 ms: docs/lanes.md, TCP.
_FAR_NBYTES = 2 * 150_000_000 // 96
_TCP = Path("/proc/sys/net/ipv4")
_NEEDED = ("grpcio", "protobuf", "numpy", "zstandard", "blake3", "pydantic")


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

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def examine() -> Iterator[DoctorCheck]:
    """Look at everything a run needs, cheap things first."""
    yield from _versions()
    yield from _machine()
    yield _loopback()
    yield from _devices()
    yield from _lanes()
    yield from _engines()


def _versions() -> Iterator[DoctorCheck]:
    python = platform.python_version()
    yield DoctorCheck(
        area="versions",
        name="python",
        works=sys.version_info >= (3, 11),
        found=python,
        advice="" if sys.version_info >= (3, 11) else "install Python 3.11 or later",
    )
    yield DoctorCheck(area="versions", name="astraflow", works=True, found=__version__)
    for name in _NEEDED:
        found = _release(name)
        advice = "" if found else "install astraflow again: this package belongs to it"
        yield DoctorCheck(
            area="versions",
            name=name,
            works=found is not None,
            found=found or "missing",
            advice=advice,
        )


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[DoctorCheck]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield DoctorCheck(area="machine", name="cores", works=True, found=str(cores))
    free = psutil.virtual_memory().available
    yield _at_least("memory", free, 4 * _GIB, "close other programs: a small run takes 4 GiB")
    disk = shutil.disk_usage(Path.cwd()).free
    yield _at_least("disk here", disk, 2 * _GIB, "free some space, or give --runs another folder")
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    writable = os.access(cache, os.W_OK)
    yield DoctorCheck(
        area="machine",
        name="cache",
        works=writable,
        found=str(cache),
        advice="" if writable else "point XDG_CACHE_HOME at a folder that you can write",
    )
    yield _kernels()


def _kernels() -> DoctorCheck:
    level = kernels.level()
    compiled = level is not kernels.KernelLevel.NUMPY
    advice = "install a C compiler and astraflow again, or unset ASTRAFLOW_KERNELS"
    return DoctorCheck(
        area="machine",
        name="weight codec",
        works=True if compiled else None,
        found=f"compiled, {level.name.lower()}" if compiled else "numpy, about 30 times slower",
        advice="" if compiled else advice,
    )


def _at_least(name: str, found: int, wanted: int, advice: str) -> DoctorCheck:
    enough = found >= wanted
    return DoctorCheck(
        area="machine",
        name=name,
        works=enough,
        found=f"{found / _GIB:.1f} GiB free",
        advice="" if enough else advice,
    )


def _loopback() -> DoctorCheck:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
    except OSError as error:
        return DoctorCheck(
            area="ports",
            name="loopback",
            works=False,
            found=str(error),
            advice="allow connections on 127.0.0.1: the processes of a run meet there",
        )
    return DoctorCheck(
        area="ports", name="loopback", works=True, found=f"port {port} opened and dialled"
    )


def _devices() -> Iterator[DoctorCheck]:
    if find_spec("torch") is None:
        advice = install("torch")
        yield DoctorCheck(area="devices", name="torch", works=False, found="missing", advice=advice)
        return
    import torch  # noqa: PLC0415 - slow to import, an extra

    yield DoctorCheck(area="devices", name="torch", works=True, found=torch.__version__)
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield DoctorCheck(
        area="devices",
        name="GPU",
        works=True if count else None,
        found=names or "none: everything runs on the CPU",
    )


def _lanes() -> Iterator[DoctorCheck]:
    yield DoctorCheck(area="lanes", name="grpc", works=True, found="always there")
    yield _tcp_lane()
    yield _shm_lane()
    ucx = _release("ucxx-cu12") or _release("ucx-py-cu12")
    yield DoctorCheck(
        area="lanes",
        name="ucx",
        works=None if ucx is None else True,
        found=f"ucxx {ucx}" if ucx else "missing",
        advice=f"{install('ucx')}, for fabrics that UCX knows" if not ucx else "",
    )
    release = _release("fsspec")
    yield DoctorCheck(
        area="lanes",
        name="object store",
        works=None if release is None else True,
        found="missing" if release is None else f"fsspec {release}",
        advice=f"{install('store')}, if versions go by a bucket" if not release else "",
    )


def _tcp_lane() -> DoctorCheck:
    """Say how much a connection may have on its way; far links are slow where that is little."""
    try:
        room = min(int((_TCP / name).read_text().split()[-1]) for name in ("tcp_rmem", "tcp_wmem"))
    except (OSError, ValueError, IndexError):
        return DoctorCheck(
            area="lanes", name="tcp", works=True, found="buffers as the system has them"
        )
    wide = room >= _FAR_NBYTES
    return DoctorCheck(
        area="lanes",
        name="tcp",
        works=True,
        found=f"buffers up to {room / _MIB:.0f} MiB a connection",
        advice=""
        if wide
        else "across oceans, raise the maxima of net.ipv4.tcp_rmem and tcp_wmem: docs/lanes.md",
    )


def _shm_lane() -> DoctorCheck:
    works = hasattr(os, "memfd_create") and os.access(tempfile.gettempdir(), os.W_OK)
    return DoctorCheck(
        area="lanes",
        name="shm",
        works=True if works else None,
        found=tempfile.gettempdir() if works else "missing",
        advice="" if works else "on Linux, point TMPDIR at a folder that you can write",
    )


def _engines() -> Iterator[DoctorCheck]:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    yield DoctorCheck(
        area="engines",
        name="embedded",
        works=not missing,
        found=f"missing {', '.join(missing)}" if missing else "torch and transformers are there",
        advice=install("torch") if missing else "",
    )
    for kind in ("vllm", "sglang"):
        variable = f"ASTRAFLOW_{kind.upper()}_PYTHON"
        named = os.environ.get(variable)
        works = None if named is None else os.access(named, os.X_OK)
        yield DoctorCheck(
            area="engines",
            name=kind,
            works=works,
            found=f"{variable} is {named or 'not set'}",
            advice="" if works else f"set {variable}, or: {install_server(kind)}",
        )
