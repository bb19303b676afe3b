"""The trackers that need packages of their own keep what they get, without a network."""

import importlib.util
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.tracking.trackers import Tracked, make_tracker
from tests.launch.tracking.test_follower import add_eval, add_steps, run_dir

__all__ = ["run_dir"]

NAMES = ("wandb", "mlflow", "trackio")


def needs(package):
    is_here = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_here, reason=f"needs {package}: astraflow[track]")


def shown(run_dir, name, **variables):
    """Show steps 1 and 2, then a third one, from processes of their own as `astraflow track`."""
    add_eval(run_dir, 7)
    for steps in ((1, 2), (3,)):
        add_steps(run_dir, *steps)
        done = subprocess.run(
            [sys.executable, "-m", "astraflow", "track", str(run_dir.root), "--to", name],
            cwd=run_dir.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs("wandb")
def test_wandb_keeps_rows_while_it_is_offline(run_dir, tmp_path):
    shown(run_dir, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    kept = list((run_dir.root / "wandb" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 2
    assert b"train/loss" in b"".join(path.read_bytes() for path in kept)


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_keeps_rows_in_a_file(run_dir, tmp_path):
    shown(run_dir, "mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as kept:
        rows = kept.execute("select step, value from metrics where key = 'train/loss'").fetchall()
    assert sorted(rows) == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.slow
@needs("trackio")
def test_trackio_keeps_rows_on_this_machine(run_dir, tmp_path):
    shown(run_dir, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HOME=str(tmp_path / "hf"))
    kept = [path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert any(b"train/loss" in each for each in kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing_is_named(name, tmp_path):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is here")
    tracked = Tracked(run="sort", policy="solver", folder=tmp_path, recipe={})
    with pytest.raises(AstraflowError, match=f"needs the package {name}") as caught:
        make_tracker(name, tracked)
    assert caught.value.reason is Reason.CODE_UNKNOWN
    assert "pip install '" in caught.value.message
