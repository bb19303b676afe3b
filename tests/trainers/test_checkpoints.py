"""Checkpoints are Hugging Face directories."""

import json
import resource
from threading import Event

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import Keep, TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.checkpoints import (
    OPTIMIZER_FILE,
    Checkpoints,
    drafted,
    drop_drafts,
    place,
    start_points,
)
from astraflow.trainers.model_files import save_model
from astraflow.trainers.torch_engine import TorchEngine


@pytest.fixture
def engine(model_dir):
    engine = TorchEngine(TrainerConfig(), model_dir=model_dir)
    engine.prepare()
    return engine


def same_weights(left, right):
    others = dict(right.named_parameters())
    return all(torch.equal(weights, others[name]) for name, weights in left.named_parameters())


def test_saved_model_loads_as_it_was(tmp_path, engine):
    with torch.no_grad():
        dict(engine.named_parameters())["model.norm.weight"].add_(0.1)
    checkpoints = Checkpoints(engine, run_dir=RunDir(tmp_path), policy_id="solver")
    name = checkpoints.save(step=7, version=9)
    directory = tmp_path / "checkpoints" / "solver" / name
    assert name == "step_000007"
    assert same_weights(AutoModelForCausalLM.from_pretrained(directory), engine)
    assert AutoTokenizer.from_pretrained(directory)("ba").input_ids == [1, 4, 3]
    state = json.loads((directory / "trainer_state.json").read_text())
    assert state == {"step": 7, "version": 9, "checkpoint_id": "step_000007"}


def test_same_step_is_written_once(tmp_path, engine):
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    checkpoints.save(step=1, version=1)
    written = run_dir.checkpoint("solver", 1).stat().st_ino
    checkpoints.save(step=1, version=1)
    assert run_dir.checkpoint("solver", 1).stat().st_ino == written


def test_the_first_the_newest_and_the_named_ones_outlive_a_thinning(tmp_path, engine):
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    for step in range(6):
        checkpoints.save(step=step, version=step, checkpoint_id="mine" if step == 2 else "")
    checkpoints.thin_out(Keep())
    left = sorted(path.name for path in run_dir.checkpoints("solver").iterdir())
    assert left == [f"step_{step:06d}" for step in (0, 2, 4, 5)]


def test_older_directory_gives_way_whole(tmp_path, make_model):
    target = tmp_path / "model"
    target.mkdir()
    (target / "leftover").write_text("old")
    save_model(make_model().module, target)
    assert not (target / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_write_leaves_no_directory(tmp_path, make_model, model_dir):
    module = make_model().module
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        save_model(module, tmp_path / "out" / "step", companions_of=model_dir)
    assert not (tmp_path / "out" / "step").exists()


def test_masters_are_saved_in_f32(tmp_path, make_model):
    save_model(make_model().module, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_training_goes_on_bit_for_bit(tmp_path, model_dir, engine, make_batch):
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    for step in (1, 2, 3):
        engine.train_step(make_batch(6, seed=step))
        checkpoints.save(step=step, version=step + 4)
    metrics = engine.train_step(make_batch(6, seed=4))
    points = start_points(run_dir, "solver")
    assert [(point.step, point.version) for point in points] == [(3, 7), (2, 6), (0, None)]
    again = TorchEngine(TrainerConfig(), model_dir=model_dir)
    again.prepare()
    again.restore(points[0].directory)
    assert again.step_count == 3
    assert again.train_step(make_batch(6, seed=4)) == metrics
    assert same_weights(engine, again)


def test_what_cannot_be_restored_changes_nothing(tmp_path, engine, make_batch):
    engine.train_step(make_batch(6))
    before = {name: weights.clone() for name, weights in engine.named_parameters()}
    engine.save(tmp_path)
    engine.wait_for_save()
    (tmp_path / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(AstraflowError, match=r"optimizer\.pt cannot be read") as caught:
        engine.restore(tmp_path)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert engine.step_count == 1
    assert all(torch.equal(before[name], now) for name, now in engine.named_parameters())


def test_a_state_that_cannot_be_let_go_is_told(tmp_path, engine):
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    checkpoints.save(step=1, version=1)
    (tmp_path / "elsewhere").mkdir()
    # A link is let go by nobody who does not know what it leads to.
    (run_dir.checkpoint("solver", 1) / "optimizer").symlink_to(tmp_path / "elsewhere")
    checkpoints.save(step=2, version=2)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - Python 3.13 shows its path alone
        checkpoints.save(step=3, version=3)
    assert "symbolic link" in caught.value.args[0]


def test_what_an_engine_raises_that_saves_is_raised_as_it_is(tmp_path, engine, monkeypatch):
    def fail():
        raise KeyError("of the user's engine")

    checkpoints = Checkpoints(engine, run_dir=RunDir(tmp_path), policy_id="solver")
    monkeypatch.setattr(engine, "wait_for_save", fail)
    with pytest.raises(KeyError, match="of the user's engine"):
        checkpoints.save(step=1, version=1)


def test_a_checkpoint_that_the_disk_has_no_room_for_says_so(tmp_path, engine):
    checkpoints = Checkpoints(engine, run_dir=RunDir(tmp_path), policy_id="solver")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(AstraflowError, match=r"its disk has [\d,]+ MiB left") as caught:
            checkpoints.save(step=1, version=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.reason is Reason.CAPACITY_EXCEEDED
    assert start_points(RunDir(tmp_path), "solver")[0].step == 0


def test_what_the_run_named_is_kept_whole_and_found_under_both_names(tmp_path, engine):
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    checkpoints.save(step=1, version=1)
    written = run_dir.checkpoint("solver", 1).stat().st_ino
    assert checkpoints.save(step=1, version=1, checkpoint_id="mine") == "mine"
    assert run_dir.checkpoint("solver", 1).stat().st_ino == written
    for step in (2, 3, 4):
        checkpoints.save(step=step, version=step)
    points = start_points(run_dir, "solver")
    assert [point.checkpoint_id for point in points] == [
        "step_000004",
        "step_000003",
        "mine",
        "step_000001",
        "",
    ]
    assert not (run_dir.checkpoint("solver", 2) / OPTIMIZER_FILE).exists()


class Slow:
    """Leaves the end of every checkpoint until it is let go."""

    def __init__(self):
        self.is_free = Event()

    def save(self, directory):
        (directory / "weights").write_bytes(b"whole")

    def wait_for_save(self):
        assert self.is_free.wait(200)


def test_a_checkpoint_is_there_once_it_is_whole(tmp_path):
    engine, run_dir, told = Slow(), RunDir(tmp_path), Event()
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    written = checkpoints.begin(step=1, version=1, then=told.set)
    assert not written.done()
    assert start_points(run_dir, "solver")[0].step == 0
    engine.is_free.set()
    assert written.result() == "step_000001"
    assert told.is_set()
    assert start_points(run_dir, "solver")[0].step == 1
    assert checkpoints.begin(step=1, version=1, checkpoint_id="mine").result() == "mine"
    assert start_points(run_dir, "solver")[0].checkpoint_id == "mine"


def at_once():
    engine = Slow()
    engine.is_free.set()
    return engine


def test_what_a_trainer_goes_back_from_does_not_outlive_what_it_saves_then(tmp_path):
    run_dir = RunDir(tmp_path)
    before = Checkpoints(at_once(), run_dir=run_dir, policy_id="solver")
    for step in (0, 10, 20, 30):
        before.save(step=step, version=step, checkpoint_id="mine" if step == 10 else "")
    start = next(each for each in start_points(run_dir, "solver") if each.checkpoint_id == "mine")
    again = Checkpoints(at_once(), run_dir=run_dir, policy_id="solver", start=start)
    for step in (15, 18):
        again.save(step=step, version=step + 20)
        (newest, *_) = start_points(run_dir, "solver")
        assert newest.step == step
        again.thin_out(Keep())
    left = sorted(path.name for path in run_dir.checkpoints("solver").iterdir())
    assert left == [f"step_{step:06d}" for step in (0, 10, 15, 18)]


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_checkpoint_before(tmp_path, nursery, run_apart):
    run_dir = RunDir(tmp_path / "run")
    with run_apart("save_half", run_dir.root) as said:
        nursery.kill(int(said.readline()))
    assert [point.step for point in start_points(run_dir, "solver")] == [1, 0]
    Checkpoints(Slow(), run_dir=run_dir, policy_id="solver")
    assert [path.name for path in run_dir.checkpoints("solver").iterdir()] == ["step_000001"]


def test_what_a_killed_one_left_of_a_directory_that_gave_way_is_dropped(tmp_path, monkeypatch):
    target = tmp_path / "step_000001"
    target.mkdir()
    (target / "weights").write_text("old")

    def killed(_path):
        raise KeyboardInterrupt

    draft = drafted(target)
    (draft / "weights").write_text("new")
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        place(draft, target)
    monkeypatch.undo()
    drop_drafts(tmp_path)
    assert [*tmp_path.iterdir()] == [target]
    assert (target / "weights").read_text() == "new"
