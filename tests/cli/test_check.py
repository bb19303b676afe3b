"""The command: what it prints, how it ends, and that a run is refused by it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app

ROOT = Path(__file__).parents[2]
SORT = str(ROOT / "recipes" / "sort.yaml")
WRONG = ("--set", "workflows.sort.scorer=numerc", "--set", "track=[tensorbord]")


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What a command says in an empty folder."""
    monkeypatch.chdir(tmp_path)
    # Not shorter than the lines.
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_a_right_recipe_can_be_run(tmp_path):
    command = [sys.executable, "-m", "astraflow", "check", SORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can be run" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_has_every_finding_with_stable_keys(said):
    done = said("check", SORT, "--json", *WRONG)
    assert done.exit_code == 2
    report = json.loads(done.stdout)
    assert report.keys() == {"recipe", "ok", "findings", "wall_s"}
    assert report["ok"] is False
    places = {finding["place"]: finding for finding in report["findings"]}
    assert places.keys() == {"workflows.sort.scorer", "track.0"}
    keys = {"severity", "place", "what", "cure", "detail", "is_local"}
    assert places["track.0"].keys() == keys
    assert places["track.0"]["severity"] == "error"


@pytest.mark.parametrize("more", [(), ("--json",), ("--dry-run",)])
def test_a_run_of_a_wrong_recipe_is_refused_before_anything_is_written(said, tmp_path, more):
    done = said("run", SORT, *more, *WRONG)
    assert done.exit_code == 2
    assert "did you mean numeric?" in done.stderr
    assert "did you mean tensorboard?" in done.stderr
    assert ("max_staleness: 2" in done.stdout) is ("--dry-run" in more)
    assert list(tmp_path.iterdir()) == []


def test_the_places_are_shown_with_what_to_do(said):
    done = said("check", SORT, *WRONG)
    assert done.exit_code == 2
    lines = done.stdout.splitlines()
    assert lines[lines.index("track.0") + 1].split()[:2] == ["error", "'tensorbord'"]
    assert lines[lines.index("track.0") + 2].strip() == "→ did you mean tensorboard?"
    assert "refused: 2 errors" in lines[-1]
