"""Which tensors the adapters of a model have, and the files that a server reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.config.recipe import Lora
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.adapters import adapter_model, changed, write_adapter
from astraflow.engines.served.dialect import AdapterLimits
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.sglang.dialect import adapter_options as sglang_options
from astraflow.engines.vllm.dialect import adapter_options
from astraflow.storage.weight_files import read_weights
from astraflow.trainers.lora import load_adapted_model, read_lora, trained_parameters
from tests.engines.adapter_updates import adapters, update


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_the_tensors_are_those_that_a_trainer_publishes(model: Any, targets: tuple[str, ...]):
    settings = Lora(rank=3, targets=targets)
    found = adapter_model(ModelDescription.read(model.folder, None), settings)
    trained = load_adapted_model(model.folder, settings, device="cpu")
    published = trained_parameters(trained.module)
    assert found.shapes == {name: tuple(each.shape) for name, each in published.items()}


def test_targets_that_the_model_has_not_are_refused(model: Any):
    read = ModelDescription.read(model.folder, None)
    for odd in ("lm_head", "embed_tokens", "nothing"):
        with pytest.raises(AstraflowError, match=f"no linear layer {odd}") as caught:
            adapter_model(read, Lora(targets=("q_proj", odd)))
        assert caught.value.reason is Reason.INVALID_FIELD
    with pytest.raises(AstraflowError, match="it has none"):
        adapter_model(replace(read, shapes={}), Lora())


def test_layers_of_a_model_with_experts_have_to_be_named(model: Any):
    read = ModelDescription.read(model.folder, None)
    path = "model.layers.0.mlp.experts.0.up_proj.weight"
    mixed = replace(read, shapes={**read.shapes, path: (48, 32)})
    with pytest.raises(AstraflowError, match="has experts") as caught:
        adapter_model(mixed, Lora())
    assert caught.value.reason is Reason.INVALID_FIELD
    assert adapter_model(mixed, Lora(targets=("q_proj",))).shapes


def test_a_sparse_update_leaves_what_is_held_as_it_was(model: Any):
    shapes = adapter_model(ModelDescription.read(model.folder, None), Lora(rank=2)).shapes
    given = adapters(shapes, seed=0)
    held = changed({}, update("solver", 0, given))
    name = min(given)
    new = {name: given[name] + 1}
    made = changed(held, update("solver", 1, new, base=0, indices=[2]))
    flat = given[name].reshape(-1)
    np.testing.assert_array_equal(held[name].values.view("f4"), flat)
    flat[2] += 1
    np.testing.assert_array_equal(made[name].values.view("f4"), flat)
    assert all(made[other] is held[other] for other in given if other != name)


def test_the_files_are_those_of_peft(model: Any, tmp_path: Path):
    settings = Lora(rank=2, alpha=3.0, targets=("v_proj", "q_proj"))
    shapes = adapter_model(ModelDescription.read(model.folder, None), settings).shapes
    given = adapters(shapes, seed=0)
    folder = tmp_path / "adapter"
    write_adapter(folder, changed({}, update("s", 0, given)), settings, base=model.folder)
    assert read_lora(folder) == replace_targets(settings, ("q_proj", "v_proj"))
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(model.folder)
    for name, stored in read_weights(folder).items():
        np.testing.assert_array_equal(stored.bits.view("f4"), given[name])


def replace_targets(settings: Lora, targets: tuple[str, ...]) -> Lora:
    return settings.model_copy(update={"targets": targets})


def test_vllm_gets_the_least_rank_that_it_knows():
    options = adapter_options(AdapterLimits(count=8, rank=17, targets=()))
    assert options[options.index("--max-lora-rank") + 1] == "32"
    assert options[options.index("--max-loras") + 1] == "8"
    assert adapter_options(None) == ()
    with pytest.raises(AstraflowError, match="513") as caught:
        adapter_options(AdapterLimits(count=8, rank=513, targets=()))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_sglang_is_told_of_the_layers_and_counts_the_model_alone():
    room = AdapterLimits(count=8, rank=17, targets=("q_proj", "up_proj"))
    options = sglang_options(room, is_on_cpu=False)
    assert options[options.index("--lora-target-modules") + 1 :][:2] == ("q_proj", "up_proj")
    assert options[options.index("--max-loras-per-batch") + 1] == "9"
    assert sglang_options(None, is_on_cpu=True) == ()
    with pytest.raises(AstraflowError, match="pinned memory") as caught:
        sglang_options(room, is_on_cpu=True)
    assert caught.value.reason is Reason.CAPABILITY_MISSING
