"""Code that is named `module:attribute`."""

import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

from astraflow.core.errors import AstraflowError, Reason


def add_code_folder(folder: Path) -> None:
    """Let `module:attribute` name a file in a folder, after all that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@cache
def see_working_directory() -> None:
    """Let `module:attribute` name a file beside the user; `load` does."""
    if "" not in sys.path:
        add_code_folder(Path.cwd())


def load(target: str, *, what: str) -> Any:
    """Return what `module:attribute` stands for; imports the module.

    Args:
        target: A module and an attribute of it; the attribute may have dots.
        what: Names it in the message.

    Raises:
        AstraflowError: CODE_UNKNOWN.
    """
    see_working_directory()
    module_name, _, attribute = target.partition(":")
    try:
        thing: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except (Exception, SystemExit) as error:
        why = f"its module raised {type(error).__name__}: {error}"
        if isinstance(error, ImportError | AttributeError):
            why = f"{error}; is it installed, or on PYTHONPATH, here?"
        raise AstraflowError(Reason.CODE_UNKNOWN, f"{what} cannot be loaded: {why}") from error
    return thing
