"""The tutorials, cell by cell, with real runs."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.notebook
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["first_run", "own_workflow", "own_algorithm"])
def test_a_tutorial_runs_to_its_end(monkeypatch, name):
    pytest.importorskip("nbclient")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    notebooks = importlib.import_module("run_notebooks")
    done = notebooks.execute(ROOT / "docs" / "tutorials" / f"{name}.ipynb")
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")


def test_a_cell_keeps_what_a_terminal_shows_in_the_end(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    screen = importlib.import_module("run_notebooks").screen
    redrawn = "before\nstep 1\nwaits\n\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K\x1b[1mstep 2\x1b[0m\n"
    assert screen(redrawn).split() == ["before", "step", "2"]
