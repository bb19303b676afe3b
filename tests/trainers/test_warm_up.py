"""Warm-up models are made once."""

import os

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from astraflow.config.recipe import ModelConfig, WarmUp
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.optimizer import WeightOptimizer
from astraflow.trainers.supervised import Schedule, pack_pairs
from astraflow.trainers.warm_up import ensure_model, warm_up_key
from astraflow.workflows.building import build_tutor
from astraflow.workflows.tutors import Pair, write_tokenizer

SHORT = WarmUp(tutor="letter_sort:SortTutor", step_count=3, batch_size=4)


def bits_of(directory):
    return export_bits(AutoModelForCausalLM.from_pretrained(directory), Dtype.F32)


def test_model_is_made_once_and_found_again(tmp_path):
    made = ensure_model(ModelConfig(warm_up=SHORT), seed=0, cache_dir=tmp_path)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(ModelConfig(warm_up=SHORT), seed=0, cache_dir=tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert (made / "tokenizer.json").exists()
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_what_a_killed_warm_up_left_does_not_stop_the_next_one(tmp_path):
    """In a container a process that is started again has the id that the last one had."""
    made = ensure_model(ModelConfig(warm_up=SHORT), seed=0, cache_dir=tmp_path / "other")
    folder = tmp_path / "cache" / "warm_up"
    (folder / f".{made.name}.{os.getpid()}.tokenizer").mkdir(parents=True)
    again = ensure_model(ModelConfig(warm_up=SHORT), seed=0, cache_dir=tmp_path / "cache")
    assert again == folder / made.name


def test_same_seed_makes_the_same_weights(tmp_path):
    left, right = (
        bits_of(ensure_model(ModelConfig(warm_up=SHORT), seed=3, cache_dir=tmp_path / side))
        for side in ("left", "right")
    )
    assert all((bits == right[name]).all() for name, bits in left.items())


def test_seed_settings_and_tutor_tell_models_apart():
    sorting = build_tutor("letter_sort:SortTutor", {})
    keys = {
        warm_up_key(SHORT, sorting, seed=0),
        warm_up_key(SHORT, sorting, seed=1),
        warm_up_key(SHORT.model_copy(update={"step_count": 4}), sorting, seed=0),
        warm_up_key(SHORT, build_tutor("letter_sort:SortTutor", {"accuracy": 0.9}), seed=0),
        warm_up_key(SHORT, build_tutor("letter_sort:RetryTutor", {}), seed=0),
    }
    assert len(keys) == 5


def test_given_path_is_taken_as_it_is(tmp_path):
    assert (
        ensure_model(ModelConfig(path=tmp_path), seed=0, cache_dir=tmp_path / "cache") == tmp_path
    )
    assert not (tmp_path / "cache").exists()


def test_unknown_tutor_is_named(tmp_path):
    with pytest.raises(AstraflowError, match="letter_sorts"):
        ensure_model(ModelConfig(warm_up=WarmUp(tutor="letter_sorts")), seed=0, cache_dir=tmp_path)


def test_loss_applies_to_completions_and_their_end(tmp_path):
    write_tokenizer(tmp_path, "ab>")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pairs = [Pair(prompt="ba>", completion="ab"), Pair(prompt="b>", completion="b")]
    rows = pack_pairs(tokenizer, pairs)
    assert rows.tokens.tolist() == [1, 4, 3, 5, 3, 4, 2, 1, 4, 5, 4, 2]
    assert rows.offsets.tolist() == [0, 7, 12]
    assert rows.loss.positions.tolist() == [4, 5, 6, 10, 11]
    assert rows.loss.rows.tolist() == [0, 0, 0, 1, 1]


def test_rate_rises_in_the_first_tenth_and_falls_to_a_tenth():
    schedule = Schedule(step_count=100, batch_size=1, learning_rate=1.0)
    optimizer = WeightOptimizer(torch.nn.Linear(1, 1), schedule.optimizer)
    rates = [optimizer.rate(step) for step in (1, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 0.55, 0.1])
    for count in (1, 2, 7):
        few = Schedule(step_count=count, batch_size=1, learning_rate=1.0)
        assert WeightOptimizer(torch.nn.Linear(1, 1), few.optimizer).rate(1) == 1.0
