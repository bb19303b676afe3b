"""Checkpoints are Hugging Face directories."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import Trainer
from astraflow.config.run_dir import RunDir
from astraflow.core.dtype import Dtype
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.checkpoints import Checkpoints, save_model
from astraflow.trainers.export import export_bits
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.resume import OPTIMIZER_FILE, start_points


def same_weights(left, right):
    other = export_bits(right, Dtype.F32)
    return all((bits == other[name]).all() for name, bits in export_bits(left, Dtype.F32).items())


def test_saved_model_loads_as_it_was(tmp_path, model_dir):
    model = load_causal_model(model_dir, device="cpu")
    with torch.no_grad():
        model.module.model.norm.weight.add_(0.1)
    checkpoints = Checkpoints(
        model.module, model_dir=model_dir, run_dir=RunDir(tmp_path), policy_id="solver"
    )
    name = checkpoints.save(step=7, version=9)
    directory = tmp_path / "checkpoints" / "solver" / name
    assert name == "step_000007"
    assert same_weights(AutoModelForCausalLM.from_pretrained(directory), model.module)
    assert AutoTokenizer.from_pretrained(directory)("ba").input_ids == [1, 4, 3]
    state = json.loads((directory / "trainer_state.json").read_text())
    assert state == {"step": 7, "version": 9, "checkpoint_id": "step_000007"}


def test_same_step_is_written_once(tmp_path, model_dir):
    model = load_causal_model(model_dir, device="cpu")
    run_dir = RunDir(tmp_path)
    checkpoints = Checkpoints(
        model.module, model_dir=model_dir, run_dir=run_dir, policy_id="solver"
    )
    checkpoints.save(step=1, version=1)
    written = run_dir.checkpoint("solver", 1).stat().st_ino
    checkpoints.save(step=1, version=1)
    assert run_dir.checkpoint("solver", 1).stat().st_ino == written


def test_the_first_the_newest_and_the_named_ones_outlive_a_thinning(tmp_path, model_dir):
    run_dir = RunDir(tmp_path)
    module = load_causal_model(model_dir, device="cpu").module
    checkpoints = Checkpoints(module, model_dir=model_dir, run_dir=run_dir, policy_id="solver")
    for step in range(6):
        checkpoints.save(step=step, version=step, checkpoint_id="mine" if step == 2 else "")
    checkpoints.thin_out()
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


def learned(model, learner, seed):
    """Make one step along a gradient that depends on a seed alone."""
    chance = torch.Generator().manual_seed(seed)
    for weights in model.module.parameters():
        weights.grad = torch.randn(weights.shape, generator=chance)
    learner._step_count += 1
    learner._optimizer.step(learner.step_count)


def test_training_goes_on_bit_for_bit(tmp_path, model_dir):
    run_dir, settings = RunDir(tmp_path), Trainer()
    model = load_causal_model(model_dir, device="cpu")
    learner = PolicyLearner(model, settings)
    checkpoints = Checkpoints(
        model.module,
        model_dir=model_dir,
        run_dir=run_dir,
        policy_id="solver",
        optimizer=learner.state,
    )
    for step in (1, 2, 3):
        learned(model, learner, step)
        checkpoints.save(step=step, version=step + 4)
    learned(model, learner, 4)
    points = start_points(run_dir, "solver", model_dir=model_dir)
    assert [(point.step, point.version) for point in points] == [(3, 7), (2, 6), (0, None)]
    again = load_causal_model(points[0].directory, device="cpu")
    resumed = PolicyLearner(again, settings)
    resumed.resume(points[0].step, points[0].directory / OPTIMIZER_FILE)
    learned(again, resumed, 4)
    assert same_weights(model.module, again.module)


def test_what_the_run_named_is_kept_whole_and_found_under_both_names(tmp_path, model_dir):
    run_dir, model = RunDir(tmp_path), load_causal_model(model_dir, device="cpu")
    learner = PolicyLearner(model, Trainer())
    checkpoints = Checkpoints(
        model.module,
        model_dir=model_dir,
        run_dir=run_dir,
        policy_id="solver",
        optimizer=learner.state,
    )
    checkpoints.save(step=1, version=1)
    written = run_dir.checkpoint("solver", 1).stat().st_ino
    assert checkpoints.save(step=1, version=1, checkpoint_id="mine") == "mine"
    assert run_dir.checkpoint("solver", 1).stat().st_ino == written
    for step in (2, 3, 4):
        checkpoints.save(step=step, version=step)
    points = start_points(run_dir, "solver", model_dir=model_dir)
    assert [point.checkpoint_id for point in points] == [
        "step_000004",
        "step_000003",
        "mine",
        "step_000001",
        "",
    ]
