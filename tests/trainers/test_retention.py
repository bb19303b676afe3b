"""Which checkpoints stay."""

import json
from pathlib import Path

import pytest

from astraflow.config.recipe import Keep
from astraflow.config.run_dir import RunDir
from astraflow.trainers.checkpoints import Checkpoints


def thin_out(run_dir, keep):
    Checkpoints(None, run_dir=run_dir, policy_id="solver").thin_out(keep)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path)


def write(run_dir, steps, named=()):
    for step in steps:
        directory = run_dir.checkpoint("solver", step)
        directory.mkdir(parents=True)
        name = "mine" if step in named else directory.name
        state = {"step": step, "version": step + 100, "checkpoint_id": name}
        (directory / "trainer_state.json").write_text(json.dumps(state))


def left(run_dir):
    folder = run_dir.checkpoints("solver")
    assert all(path.name.startswith("step_") for path in folder.iterdir())
    return [int(path.name[5:]) for path in sorted(folder.iterdir())]


def log(path: Path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward(step, value, policy="solver"):
    return {"policy": policy, "step": step, "reward/mean": value}


def evaluated(version, value, suite="held_out"):
    overall = None if value is None else {"avg_at_k": value}
    return {"suite": suite, "versions": {"solver": version}, "overall": overall}


def test_the_first_the_newest_and_the_named_stay(run_dir):
    write(run_dir, range(9), named=[4])
    thin_out(run_dir, Keep(last=3))
    assert left(run_dir) == [0, 4, 6, 7, 8]


def test_the_newest_is_that_of_most_steps_however_many_these_are(run_dir):
    write(run_dir, [0, 999_998, 999_999, 1_000_000])
    thin_out(run_dir, Keep())
    assert left(run_dir) == [0, 1_000_000, 999_999]


def test_what_no_evaluation_measured_is_not_the_best(run_dir):
    write(run_dir, range(5))
    path = run_dir.checkpoint("solver", 1) / "trainer_state.json"
    path.write_text(json.dumps({"step": 1, "version": None, "checkpoint_id": "step_000001"}))
    log(run_dir.evals, evaluated(102, 0.5), {**evaluated(0, 0.9), "versions": {"other": 7}})
    thin_out(run_dir, Keep(best="eval/held_out"))
    assert left(run_dir) == [0, 2, 3, 4]


def test_multiples_of_a_step_stay(run_dir):
    write(run_dir, range(0, 50, 5))
    thin_out(run_dir, Keep(every=20))
    assert left(run_dir) == [0, 20, 40, 45]


def test_the_best_by_a_metric_stays_and_a_step_that_was_made_twice_counts_as_it_is_now(run_dir):
    write(run_dir, range(7))
    rows = [reward(2, 0.9), reward(2, 0.1), reward(3, 0.7), reward(4, 0.2), reward(1, 1.0, "other")]
    log(run_dir.metrics, *rows)
    thin_out(run_dir, Keep(best="reward/mean"))
    assert left(run_dir) == [0, 3, 5, 6]


def test_the_best_by_an_evaluation_of_its_version_stays(run_dir):
    write(run_dir, range(7))
    rows = [evaluated(102, 0.5), evaluated(103, None), evaluated(104, 0.4), evaluated(101, 1, "x")]
    log(run_dir.evals, *rows)
    thin_out(run_dir, Keep(best="eval/held_out"))
    assert left(run_dir) == [0, 2, 5, 6]


def test_the_best_goes_once_there_is_a_better_one(run_dir):
    write(run_dir, range(7))
    log(run_dir.metrics, reward(2, 0.5))
    thin_out(run_dir, Keep(best="reward/mean"))
    write(run_dir, [7, 8, 9])
    log(run_dir.metrics, reward(2, 0.5), reward(7, 0.6))
    thin_out(run_dir, Keep(best="reward/mean"))
    assert left(run_dir) == [0, 7, 8, 9]


def test_what_a_killed_trainer_left_half_gone_goes(run_dir):
    write(run_dir, range(5))
    half = run_dir.checkpoint("solver", 2).with_name(".step_000002.going")
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    thin_out(run_dir, Keep())
    assert left(run_dir) == [0, 3, 4]
