"""`astraflow init`: a folder of one's own with a recipe that comes with the package."""

import shutil
from pathlib import Path
from typing import Final

import astraflow
from astraflow.core.errors import AstraflowError, Reason

_PACKAGE: Final = Path(astraflow.__file__).parent
# A recipe that is a folder has a file for each machine: the first one trains on two cores.
_MACHINES: Final = ("cpu", "gpu-8", "gpu-2x8")


def recipes_root() -> Path:
    """Return where the recipes lie: in the installed package, or beside it in a checkout.

    Raises:
        AstraflowError: NOT_READY when they are in neither.
    """
    for root in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes"):
        if (root / "sort.yaml").exists():
            return root
    raise AstraflowError(Reason.NOT_READY, "this install has no recipes; install astraflow anew")


def packaged_recipes() -> dict[str, str]:
    """Return the names that `init` knows, each with the first sentence of its recipe."""
    root = recipes_root()
    found = {path.stem: path for path in sorted(root.glob("*.yaml"))}
    found |= {path.parent.name: path for path in sorted(root.glob("*/cpu.yaml"))}
    return {name: _first_sentence(path) for name, path in found.items()}


def _first_sentence(path: Path) -> str:
    lines = path.read_text().splitlines()
    comment = " ".join(line.lstrip("# ") for line in lines[:8] if line.startswith("#"))
    for mark in (". ", ": "):
        if mark in comment:
            return comment[: comment.index(mark)]
    return comment


def init_recipe(name: str, folder: Path, *, machine: str = "cpu") -> Path:
    """Copy a recipe and what it needs into a new folder; return its `recipe.yaml`.

    Args:
        name: As `packaged_recipes` has it.
        folder: Made; one that is there has to be empty.
        machine: Whose settings: cpu, gpu-8 or gpu-2x8.

    Raises:
        AstraflowError: CODE_UNKNOWN for a name or machine that there is none of; NAME_TAKEN when
            the folder has something in it.
    """
    known = packaged_recipes()
    if name not in known:
        raise AstraflowError(
            Reason.CODE_UNKNOWN, f"there is no recipe '{name}'; there are {', '.join(known)}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise AstraflowError(
            Reason.NAME_TAKEN, f"{folder} has something in it; name another folder"
        )
    root = recipes_root()
    source = root / f"{name}.yaml"
    if not source.exists():
        source = root / name / f"{machine}.yaml"
    if not source.exists() or (source.parent == root and machine != "cpu"):
        machines = [each for each in _MACHINES if (root / name / f"{each}.yaml").exists()]
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"the recipe '{name}' is not for '{machine}', but for {', '.join(machines or ['cpu'])}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    text, is_folder = source.read_text(), source.stem in _MACHINES
    for each in sorted(source.parent.iterdir()):
        is_other = each.suffix == ".yaml" and (not is_folder or each.stem in _MACHINES)
        if is_other or each.name == "__pycache__":
            continue
        # Of a folder all but the recipe for other machines, else what the recipe names.
        named = f"{each.stem}:" if each.suffix == ".py" else each.name + "/" * each.is_dir()
        if not is_folder and named not in text:
            continue
        if each.is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(each, folder / each.name, ignore=left_out)
        else:
            shutil.copyfile(each, folder / each.name)
    if is_folder:
        # Code that several recipes have lies above their folders.
        for each in (path for path in root.glob("*.py") if f"{path.stem}:" in text):
            shutil.copyfile(each, folder / each.name)
    made = folder / "recipe.yaml"
    made.write_text(text)
    for each in folder.glob("*.yaml"):
        each.write_text(each.read_text().replace("\ncode: ..", "\ncode: ."))
    return made
