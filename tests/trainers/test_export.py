"""Weights as bits."""

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from astraflow.core.tensors import Dtype
from astraflow.trainers.lora import trained_parameters
from astraflow.trainers.mismatch import export_bits, import_bits
from astraflow.trainers.model_files import save_model
from astraflow.trainers.origin import published_layout


def nearest_even(values):
    """Return bf16 bits of f32 values, by integer arithmetic."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_bf16_is_rounded_to_nearest_ties_to_even():
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000], np.uint32)
    rng = np.random.default_rng(0)
    values = np.concatenate([ties.view(np.float32), rng.normal(size=4000).astype(np.float32)])
    module = nn.Module()
    module.w = nn.Parameter(torch.from_numpy(values))
    bits = export_bits(module, Dtype.BF16)["w"]
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, nearest_even(values))
    assert bits[:5].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000]


def test_f32_bits_are_the_masters_own_but_not_their_memory(make_model):
    module = make_model().module
    bits = export_bits(module, Dtype.F32)
    parameter = module.model.norm.weight
    np.testing.assert_array_equal(bits["model.norm.weight"].view("f4"), parameter.detach())
    with torch.no_grad():
        parameter.add_(1)
    assert (bits["model.norm.weight"].view("f4") != parameter.detach().numpy()).all()


def test_names_are_those_of_the_checkpoint(tmp_path, make_model):
    for is_tied in (True, False):
        module = make_model(tie_word_embeddings=is_tied).module
        save_model(module, tmp_path / str(is_tied))
        saved = load_file(tmp_path / str(is_tied) / "model.safetensors")
        bits = export_bits(module, Dtype.F32)
        assert bits.keys() == saved.keys()
        assert ("lm_head.weight" in bits) is not is_tied
        for name, values in saved.items():
            np.testing.assert_array_equal(bits[name].view("f4"), values.numpy())


def test_layout_has_every_tensor_in_its_shape(make_model):
    module = make_model().module
    layout = published_layout(trained_parameters(module).items(), Dtype.BF16)
    bits = export_bits(module, Dtype.BF16)
    assert {spec.name: spec.shape for spec in layout.tensors} == {
        name: values.shape for name, values in bits.items()
    }
    assert {spec.dtype for spec in layout.tensors} == {Dtype.BF16}


def test_imported_bits_are_exported_again(make_model):
    module, other = make_model().module, make_model(initializer_range=0.1).module
    bits = export_bits(module, Dtype.BF16)
    import_bits(other, bits, Dtype.BF16)
    again = export_bits(other, Dtype.BF16)
    for name, values in bits.items():
        np.testing.assert_array_equal(values, again[name])
