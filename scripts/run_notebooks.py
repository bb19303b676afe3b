"""Executes notebooks in empty folders: `run_notebooks.py [--write] NOTEBOOK...`.

With --write what the cells printed is kept in the notebook, for the site. Needs `.[notebooks]`.
"""

import os
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

# Where a cache lies, and what a process logs, is no news.
_CACHE: Final = re.compile(r"/\S*/astraflow/(?=warm_up/)")
_LOGGED: Final = re.compile(r"^\d{4}-\d\d-\d\d .*\n+", re.MULTILINE)
_CONTROL: Final = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")
_TIMEOUT_S: Final = 540


def execute(path: Path) -> Any:
    """Return a notebook with what its cells printed.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    nbformat: Any = import_module("nbformat")
    nbclient: Any = import_module("nbclient")
    os.environ["COLUMNS"] = "100"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(notebook, timeout=_TIMEOUT_S, resources=resources)
        return client.execute()


def tidy(notebook: Any) -> None:
    """Keep of each cell what a terminal shows at its end, without what differs by machine."""
    for cell in notebook.cells:
        cell.metadata = {}
        if text := "".join(output.get("text", "") for output in cell.get("outputs", ())):
            told = _CACHE.sub("~/.cache/astraflow/", _LOGGED.sub("", screen(text)))
            first = next(output for output in cell.outputs if "text" in output)
            first.text = told
            cell.outputs = [first]


def screen(text: str) -> str:
    """Return what is left on a terminal, without colours, of text that redraws lines."""
    rows, row = [""], 0
    for part in _CONTROL.split(text.replace("\r\n", "\n")):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not _CONTROL.fullmatch(part):
            rows[row] += part
    return re.sub(r"\n{3,}", "\n\n", "\n".join(each.rstrip() for each in rows))


def main() -> int:
    """Execute the notebooks that are named."""
    for path in map(Path, [name for name in sys.argv[1:] if name != "--write"]):
        notebook = execute(path)
        if "--write" in sys.argv:
            tidy(notebook)
            import_module("nbformat").write(notebook, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
