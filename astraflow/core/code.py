"""Code that is named `module:attribute`, or by a name that is built in or of an entry point."""

import importlib
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
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


@cache
def installed(group: str) -> Mapping[str, str]:
    """Return what installed packages add to a group of entry points: `module:attribute` by name."""
    return {point.name: point.value for point in entry_points(group=group)}


def find_target(
    kind: str, name: str, built_in: Mapping[str, str], *, names: Collection[str]
) -> str:
    """Return the `module:attribute` of a name.

    Args:
        kind: What it is of; entry points are in the group `astraflow.<kind>`.
        name: Built in, an entry point, or `module:attribute` itself.
        built_in: `module:attribute` by name.
        names: All that there are, for the message.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here.
    """
    if ":" in name:
        return name
    target = built_in.get(name) or installed(f"astraflow.{kind}").get(name)
    if target is None:
        near = get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names) or 'none'}."
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"{kind}: '{name}' is not known here; {hint} Code of your own is named module:Class",
        )
    return target


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
