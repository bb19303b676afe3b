"""Megatron's tensors under the names and in the shapes of Hugging Face, and back, bit for bit.

Megatron keeps queries, keys and values of a group of heads side by side in one tensor, and gate
and up of an MLP in another. Nothing of Megatron is loaded here.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from astraflow.trainers.megatron.settings import GptSettings

_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_QKV: Final = "self_attention.linear_qkv"
_FC1: Final = "mlp.linear_fc1"
_TOP: Final = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_OF_LAYER: Final = {
    "input_layernorm": ("input_layernorm",),
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    _FC1: ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def hf_names(name: str) -> tuple[str, ...]:
    """Return the names of what lies in a tensor of Megatron.

    Example:
        >>> hf_names("decoder.layers.3.mlp.linear_fc1.weight")
        ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    if name in _TOP:
        return (_TOP[name],)
    layer, part, kind = _parts(name)
    return tuple(f"model.layers.{layer}.{each}.{kind}" for each in _OF_LAYER[part])


def cut(name: str, tensor: Tensor, settings: GptSettings) -> Sequence[Tensor]:
    """Return what lies in a tensor of Megatron, in the order of `hf_names`."""
    if name in _TOP:
        return (tensor,)
    _, part, _ = _parts(name)
    if part == _FC1:
        return tensor.chunk(2)
    if part != _QKV:
        return (tensor,)
    queries = settings.head_count // settings.group_count
    shape = (settings.group_count, queries + 2, settings.head_size)
    groups = cast("Tensor", cast("Any", tensor).unflatten(0, shape))
    return [each.flatten(0, 2) for each in torch.split(groups, [queries, 1, 1], dim=1)]


def joined(name: str, tensors: Sequence[Tensor], settings: GptSettings) -> Tensor:
    """Return the tensor of Megatron that others make up, given in the order of `hf_names`."""
    if len(tensors) == 1:
        return tensors[0]
    _, part, _ = _parts(name)
    if part == _FC1:
        return torch.cat(list(tensors))
    shape = (settings.group_count, -1, settings.head_size)
    groups = [cast("Tensor", cast("Any", each).unflatten(0, shape)) for each in tensors]
    return torch.cat(groups, dim=1).flatten(0, 2)


def _parts(name: str) -> tuple[str, str, str]:
    """Return layer, module and kind of a tensor of a block."""
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, part, kind = match.groups()
    return layer, part, kind
