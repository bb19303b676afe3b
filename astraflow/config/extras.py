"""How to install what is missing: the requirements of an extra, by their own names.

Not the extra: where this package was installed from a file, an index has another one of its name,
or none.
"""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

_COMES_WITH = {
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry-sdk",
    "ucxx": "ucxx-cu12",
    "zmq": "pyzmq",
}
"""The package of an extra that brings a module, where their names differ."""
_APART = ("track",)
"""Extras of packages of which one is enough."""


_SERVERS = {"vllm": "vllm==0.32.0", "sglang": "sglang[all]==0.5.23"}
"""Releases whose interfaces are known, for GPUs; docs/engines.md has those for CPUs."""


class _Requirement(NamedTuple):
    extra: str
    name: str
    text: str

    @property
    def is_installed(self) -> bool:
        try:
            return bool(version(self.name))
        except PackageNotFoundError:
            return False


def install(*extras: str) -> str:
    """Return the command that installs what extras of this package bring and is not here."""
    wanted = [each for each in _requirements() if each.extra in extras]
    if not wanted:
        return f"pip install '.[{','.join(extras)}]' in the checkout"
    return _command([each for each in wanted if not each.is_installed] or wanted)


def install_server(kind: str, python: Path | None = None) -> str:
    """Return the command that installs vllm or sglang.

    Args:
        kind: Which.
        python: Of the environment that gets it; None: a new one, which is named to us, too.
    """
    if python is not None:
        return f"{python} -m pip install '{_SERVERS[kind]}'"
    return (
        f"python3 -m venv {kind} && {kind}/bin/pip install '{_SERVERS[kind]}' && "
        f"export ASTRAFLOW_{kind.upper()}_PYTHON=$PWD/{kind}/bin/python"
    )


def cure_of(module: str) -> str | None:
    """Return how to install what a missing module is of; None: no extra of ours has it."""
    package = _COMES_WITH.get(module, module).replace("_", "-").lower()
    known = [*_requirements()]
    extra = next((each.extra for each in known if each.name == package), None)
    if extra is None:
        return None
    others = [each for each in known if each.extra == extra and extra not in _APART]
    wanted = [each for each in known if each.extra == extra and each.name == package]
    return _command(wanted + [each for each in others if not each.is_installed])


def _requirements() -> Iterator[_Requirement]:
    try:
        told = requires("astraflow") or []
    except PackageNotFoundError:
        return
    for each in told:
        found = re.fullmatch(r'(([\w.-]+)[^;]*?)\s*;.*\bextra == "([\w-]+)"', each)
        if found is not None:
            yield _Requirement(found[3], found[2].replace("_", "-").lower(), found[1])


def _command(wanted: list[_Requirement]) -> str:
    return f"pip install {' '.join(dict.fromkeys(repr(each.text) for each in wanted))}"
