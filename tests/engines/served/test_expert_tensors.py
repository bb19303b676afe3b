"""Stacked experts are cut into the tensors of a checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import Qwen3MoeForCausalLM

from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import TensorUpdate
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.routed_experts import split_experts


@pytest.fixture
def mixture(make_model, make_mixture):
    return make_model(make_mixture().config, Qwen3MoeForCausalLM)


def test_all_weights_are_those_of_the_checkpoint(mixture):
    read = ModelDescription.read(mixture.folder, None)
    update = split_experts(mixture.update(0, seed=0), read.shapes)
    read.check(update, None)
    saved = load_file(mixture.folder / "model.safetensors")
    for part in update.tensors:
        bits = saved[part.spec.name].reshape(-1).view(np.uint32)
        np.testing.assert_array_equal(part.values.reshape(-1), bits)


def test_a_patch_names_the_experts_that_it_changes(mixture):
    read, whole = ModelDescription.read(mixture.folder, None), mixture.update(1, seed=1)
    stack = next(p for p in whole.tensors if p.spec.name.endswith("layers.1.mlp.experts.down_proj"))
    width = stack.spec.element_count // 8
    indices = np.array([0, width - 1, 5 * width + 7])
    sparse = TensorUpdate(spec=stack.spec, indices=indices, values=stack.values[indices])
    patch = split_experts(replace(whole, base_version=0, tensors=(sparse,)), read.shapes)
    read.check(patch, 0)
    found = {p.spec.name: (p.indices.tolist(), p.values.tolist()) for p in patch.tensors}
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    assert found == {
        name.format(0): ([0, width - 1], stack.values[indices[:2]].tolist()),
        name.format(5): ([7], stack.values[indices[2:]].tolist()),
    }


def test_what_a_checkpoint_has_no_names_for_stays_and_is_refused(mixture):
    read = ModelDescription.read(mixture.folder, None)
    known = {name: shape for name, shape in read.shapes.items() if "experts.7" not in name}
    less = replace(read, shapes=known)
    with pytest.raises(AstraflowError, match=r"no tensor .*experts.gate_up_proj"):
        less.check(split_experts(mixture.update(0, seed=0), known), None)
