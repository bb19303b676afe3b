"""Trackers get every row of a run once, and cannot hurt it."""

import json
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.tracking import follower
from astraflow.launch.tracking.follower import RunFollower, followed, track_run

TIME = "2026-11-21T17:01:47.772015+00:00"


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path / "sort")
    run_dir.root.mkdir()
    run_dir.recipe.write_text("name: sort\n")
    return run_dir


def add_steps(run_dir, *steps, policy="solver"):
    with run_dir.metrics.open("a") as file:
        for step in steps:
            row = {"time": TIME, "policy": policy, "step": step, "version": step - 1}
            row |= {"train/loss": step / 10, "reward/mean": None, "train/lr": float("nan")}
            file.write(json.dumps(row) + "\n")


def add_eval(run_dir, version):
    result = {
        "data_set": "held_out",
        "repeats": 2,
        "avg_at_k": 0.5,
        "pass_at_k": {"1": 0.5, "2": 0.75},
        "mean_reward": 0.25,
    }
    row = {"time": TIME, "suite": "all", "versions": {"solver": version}, "results": [result]}
    with run_dir.evals.open("a") as file:
        file.write(json.dumps(row | {"overall": result | {"data_set": ""}}) + "\n")
        file.write(json.dumps(row | {"results": [], "overall": None}) + "\n")


def scalars(folder: Path):
    """Return what TensorBoard would show: (tag, step) to value, in all event files of a folder."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            # A record: u64 length, u32 checksum, the event, u32 checksum.
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_has_every_row_once(run_dir):
    add_steps(run_dir, 1, 2)
    add_steps(run_dir, 1, policy="other")
    add_eval(run_dir, 7)
    assert dict(track_run(run_dir, ["tensorboard"], is_live=False)) == {"tensorboard": 4}
    add_steps(run_dir, 3)
    assert dict(track_run(run_dir, ["tensorboard"], is_live=False)) == {"tensorboard": 1}
    shown = scalars(run_dir.root / "tensorboard" / "solver")
    losses = [(step, round(value, 6)) for tag, step, value in shown if tag == "train/loss"]
    assert losses == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert {tag for tag, step, _ in shown if step == 7} == {
        *(f"eval/all/held_out/{name}" for name in ("avg_at_2", "reward", "pass_at_1", "pass_at_2")),
        *(f"eval/all/{name}" for name in ("avg_at_2", "reward", "pass_at_1", "pass_at_2")),
    }
    assert len(scalars(run_dir.root / "tensorboard" / "other")) == 1


def test_a_launcher_tracks_without_torch(run_dir):
    add_steps(run_dir, 1)
    code = f"""
import sys
import threading
from pathlib import Path
from astraflow.config.run_dir import RunDir
from astraflow.launch.tracking.follower import track_run
found = dict(track_run(RunDir(Path({str(run_dir.root)!r})), ["tensorboard"], is_live=False))
assert found == {{"tensorboard": 1}}, found
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run_dir):
    add_steps(run_dir, 1)
    text = run_dir.metrics.read_text()
    run_dir.metrics.write_text(text[:-10])
    reader = RunFollower(run_dir, "tensorboard")
    assert reader.follow() == 0
    run_dir.metrics.write_text(text)
    assert reader.follow() == 1
    reader.close()


def test_all_that_was_written_in_a_run_is_shown_at_its_end(run_dir):
    with followed(run_dir, ["tensorboard"]):
        add_steps(run_dir, 1, 2, 3)
    assert len(scalars(run_dir.root / "tensorboard" / "solver")) == 3


def test_a_tracker_that_is_not_there_is_left_out_of_a_run(run_dir, capsys):
    with followed(run_dir, ["no_such.module:Tracker", "tensorboard"]):
        add_steps(run_dir, 1)
    assert "a tracker is left out" in capsys.readouterr().out
    assert len(scalars(run_dir.root / "tensorboard" / "solver")) == 1


class Stuck:
    """Waits for a server that never answers."""

    asks = threading.Event()

    def __init__(self, tracked):
        pass

    def log(self, axis, at, time, values):
        self.asks.set()
        threading.Event().wait()


def test_a_tracker_that_hangs_is_left_behind(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(follower, "_END_S", 0.1)
    monkeypatch.setitem(sys.modules, "stuck", sys.modules[__name__])
    with followed(run_dir, ["stuck:Stuck"]):
        add_steps(run_dir, 1)
    assert "a tracker does not end and is left behind" in capsys.readouterr().out
    assert Stuck.asks.wait(60)


def test_the_command_says_what_is_wrong(run_dir, tmp_path):
    add_steps(run_dir, 1)
    with pytest.raises(AstraflowError) as caught:
        dict(track_run(run_dir, ["nothing"], is_live=False))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "take tensorboard, wandb, mlflow, trackio" in caught.value.message
    with pytest.raises(AstraflowError) as caught:
        dict(track_run(RunDir(tmp_path / "nowhere"), ["tensorboard"], is_live=False))
    assert caught.value.reason is Reason.NOT_READY
