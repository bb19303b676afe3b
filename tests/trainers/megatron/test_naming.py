"""Megatron's tensors are those of Hugging Face in another order, and nothing is lost on the way."""

import json

import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.megatron.model import cut, hf_names, joined, read_settings

BLOCK = "decoder.layers.1"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
}


def settings_of(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return read_settings(folder)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ("self_attention.linear_qkv.weight", 40),
        ("self_attention.linear_qkv.bias", 40),
        ("mlp.linear_fc1.weight", 80),
        ("self_attention.linear_proj.weight", 24),
        ("pre_mlp_layernorm.weight", 24),
    ],
)
def test_what_is_cut_is_joined_to_the_same_bits(tmp_path, part, rows):
    settings, name = settings_of(tmp_path), f"{BLOCK}.{part}"
    shape = (rows,) if part.endswith(("bias", "norm.weight")) else (rows, 24)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = cut(name, tensor, settings)
    assert len(parts) == len(hf_names(name))
    assert torch.equal(joined(name, parts, settings), tensor)


def test_heads_lie_by_groups(tmp_path):
    settings = settings_of(tmp_path)
    # Rows as Megatron has them: of each group three query heads, its key and its value, 4 wide.
    rows = [
        [f"q{group * 3 + n}" for n in range(3)] + [f"k{group}", f"v{group}"] for group in (0, 1)
    ]
    heads = [head for group in rows for head in group for _ in range(4)]
    numbers = {head: index for index, head in enumerate(sorted(set(heads)))}
    fused = torch.tensor([numbers[head] for head in heads])
    found = cut(f"{BLOCK}.self_attention.linear_qkv.bias", fused, settings)
    wanted = [[f"q{n}" for n in range(6)], ["k0", "k1"], ["v0", "v1"]]
    for part, names in zip(found, wanted, strict=True):
        assert part.tolist() == [numbers[name] for name in names for _ in range(4)]


def test_names_are_those_of_a_checkpoint():
    assert hf_names("embedding.word_embeddings.weight") == ("model.embed_tokens.weight",)
    assert hf_names(f"{BLOCK}.self_attention.linear_qkv.bias") == tuple(
        f"model.layers.1.self_attn.{each}_proj.bias" for each in "qkv"
    )
    assert hf_names(f"{BLOCK}.mlp.linear_fc2.weight") == ("model.layers.1.mlp.down_proj.weight",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "model_type: mixtral"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope_type: yarn"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type: linear"),
    ],
)
def test_a_model_that_is_not_mapped_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(AstraflowError) as caught:
        settings_of(tmp_path, **changes)
    assert caught.value.reason is Reason.CAPABILITY_MISSING
    assert said in caught.value.message


def test_sizes_are_read_of_old_and_new_files(tmp_path):
    found = settings_of(tmp_path)
    assert (found.group_count, found.head_size, found.rope_theta) == (2, 4, 5e5)
    old = settings_of(
        tmp_path, head_dim=None, num_key_value_heads=None, rope_parameters=None, rope_theta=1e6
    )
    assert (old.group_count, old.head_size, old.rope_theta) == (6, 4, 1e6)
