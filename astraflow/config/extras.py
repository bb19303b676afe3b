"""Which extra of the package brings a module that is missing."""

import re
from importlib.metadata import PackageNotFoundError, requires

_COMES_WITH = {
    "starlette": "fastapi",
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry-sdk",
    "ucxx": "ucxx-cu12",
    "zmq": "pyzmq",
}
"""The package of an extra that brings a module, where their names differ."""


def cure_of(module: str) -> str | None:
    """Return how to install what a missing module is of; None: no extra of ours has it."""
    try:
        wanted = requires("astraflow") or []
    except PackageNotFoundError:
        return None
    package = _COMES_WITH.get(module, module).replace("-", "_").lower()
    for requirement in wanted:
        found = re.fullmatch(r'([\w.-]+).*extra == "([\w-]+)"', requirement)
        if found is not None and found[1].replace("-", "_").lower() == package:
            return f"pip install 'astraflow[{found[2]}]'"
    return None
