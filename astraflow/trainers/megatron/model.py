"""A GPT of megatron-core with the weights of a Hugging Face directory.

Megatron keeps queries, keys and values of a group of heads side by side in one tensor, and gate
and up of an MLP in another: tensors go back and forth bit for bit. Megatron is loaded when a
model is made.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason

_KNOWN: Final = ("llama", "qwen2", "qwen3")

# Of what Megatron's own modules do as transformers' do: which values a key may have.
_SUPPORTED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "model_type": lambda said: said in _KNOWN,
    "hidden_act": lambda said: said in (None, "silu"),
    "attention_bias": lambda said: not said,
    "mlp_bias": lambda said: not said,
    "use_sliding_window": lambda said: not said,
    "quantization_config": lambda said: not said,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSettings:
    """The shape of a model.

    Attributes:
        layer_count: Blocks.
        hidden_size: Width between them.
        inner_size: Width within their MLPs.
        head_count: Of queries.
        group_count: Of keys and values.
        head_size: Width of each.
        vocabulary_size: Token ids.
        max_length: Tokens of a row.
        epsilon: Of the norms.
        rope_theta: Base of the rotary angles.
        is_tied: Whether the output layer is the embedding.
        has_qkv_bias: Whether queries, keys and values have one.
        has_qk_norm: Whether queries and keys are normed.
    """

    layer_count: int
    hidden_size: int
    inner_size: int
    head_count: int
    group_count: int
    head_size: int
    vocabulary_size: int
    max_length: int
    epsilon: float
    rope_theta: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool


def read_settings(directory: Path) -> GptSettings:
    """Read the shape of a Hugging Face model.

    Raises:
        AstraflowError: INVALID_FIELD without a config.json, CAPABILITY_MISSING for a model that is
            not mapped.
    """
    try:
        said: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{directory} cannot be loaded as a model: {error}"
        ) from error
    rope: dict[str, Any] = {
        **(said.get("rope_scaling") or {}),
        **(said.get("rope_parameters") or {}),
    }
    _require_known(said, rope)
    head_count = said["num_attention_heads"]
    return GptSettings(
        layer_count=said["num_hidden_layers"],
        hidden_size=said["hidden_size"],
        inner_size=said["intermediate_size"],
        head_count=head_count,
        group_count=said.get("num_key_value_heads") or head_count,
        head_size=said.get("head_dim") or said["hidden_size"] // head_count,
        vocabulary_size=said["vocab_size"],
        max_length=said["max_position_embeddings"],
        epsilon=said["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or said.get("rope_theta") or 10000.0,
        is_tied=bool(said.get("tie_word_embeddings")),
        has_qkv_bias=said["model_type"] == "qwen2",
        has_qk_norm=said["model_type"] == "qwen3",
    )


def _require_known(said: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    odd = [key for key, is_known in _SUPPORTED.items() if not is_known(said.get(key))]
    kind = rope.get("rope_type", rope.get("type", "default"))
    values = {key: said.get(key) for key in odd}
    if kind != "default":
        values["rope_type"] = kind
    if values:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"the Megatron adapter knows {', '.join(_KNOWN)} with plain rotary positions, not "
            f"{', '.join(f'{key}: {value}' for key, value in values.items())}; leave out "
            "trainer.engine to train it with the built-in trainer",
        )


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


@dataclass(frozen=True, slots=True)
class _Output:
    """What `GptModule` answers.

    Attributes:
        logits: f32[n, L, V].
    """

    logits: Tensor


class GptModule(nn.Module):
    """Megatron's embedding and blocks, called as a model of transformers is.

    The output layer is one of torch around the same weight, so losses can do without logits.
    """

    def __init__(self, gpt: nn.Module, settings: GptSettings) -> None:
        """Take over a GPT of Megatron."""
        super().__init__()
        self.gpt = gpt
        self.settings = settings
        made = cast("Any", gpt)
        shape = (settings.hidden_size, settings.vocabulary_size)
        self.head = nn.Linear(*shape, bias=False, device="meta")
        self.head.weight = (
            made.embedding.word_embeddings.weight if settings.is_tied else made.output_layer.weight
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return what knows how many tokens there are."""
        return cast("Any", self.gpt).embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.head

    def forward(self, input_ids: Tensor, *, use_cache: bool = False) -> _Output:
        """Return logits.

        Args:
            input_ids: i64[n, L].
            use_cache: As transformers is asked; there is none.
        """
        del use_cache
        gpt, length = cast("Any", self.gpt), input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        embedded = gpt.embedding(input_ids=input_ids, position_ids=positions)  # [L, n, H]
        states = gpt.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=self._angles(length)
        )
        return _Output(self.head(states.transpose(0, 1)))

    def _angles(self, length: int) -> Tensor:
        """Return the rotary angles, f32[L, 1, 1, head size]; Megatron's own call wants a GPU."""
        half = cast("Any", self.gpt).rotary_pos_emb.get_freqs_non_repeated(length)
        return torch.cat((half, half), dim=-1)[:, None, None]

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their names in a Hugging Face checkpoint; a tied one comes once."""
        for name, tensor in self.gpt.named_parameters():
            yield from zip(hf_names(name), cut(name, tensor, self.settings), strict=True)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a Hugging Face checkpoint.

        Raises:
            KeyError: One is missing.
            RuntimeError: One has another shape.
        """
        for name, parameter in self.gpt.named_parameters():
            parts = [tensors[each] for each in hf_names(name)]
            parameter.copy_(joined(name, parts, self.settings))


class CausalAttention(nn.Module):
    """Attention by torch's kernels; Megatron's own need a GPU to draw a mask."""

    def __init__(self, config: Any, **_: Any) -> None:
        """Take what Megatron gives to any core attention."""
        super().__init__()
        self._is_grouped = config.num_query_groups != config.num_attention_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [L, n, heads * size].

        Args:
            query: [L, n, heads, size].
            key: [L, n, groups, size].
            value: As the keys.
        """
        heads = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        found = cast("Any", nn.functional.scaled_dot_product_attention)(
            *heads, is_causal=True, enable_gqa=self._is_grouped
        )
        return found.permute(2, 0, 1, 3).flatten(2)


def load_gpt(directory: Path, device: torch.device) -> GptModule:
    """Make a GPT in f32 with the weights of a Hugging Face directory.

    Raises:
        AstraflowError: CAPABILITY_MISSING without megatron-core or for a model that is not mapped,
            INVALID_FIELD for a directory that is no such model.
    """
    settings = read_settings(directory)
    module = GptModule(_new_gpt(settings, device), settings)
    try:
        module.load(_read_tensors(directory))
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{directory} cannot be loaded into Megatron: {error}"
        ) from error
    return module.to(device)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError("it has no *.safetensors")
    load = cast("Any", safetensors).load_file
    return {name: each for file in files for name, each in load(file).items()}


def _new_gpt(settings: GptSettings, device: torch.device) -> nn.Module:
    """Make a GPT whose weights are not set yet."""
    core = _megatron("megatron.core.models.gpt.gpt_model")
    _be_alone(device)
    made = core.GPTModel(
        config=_config(settings, device),
        transformer_layer_spec=_block_spec(settings),
        vocab_size=settings.vocabulary_size,
        max_sequence_length=settings.max_length,
        share_embeddings_and_output_weights=settings.is_tied,
        position_embedding_type="rope",
        rotary_base=settings.rope_theta,
    )
    return cast("nn.Module", made)


def _config(settings: GptSettings, device: torch.device) -> Any:
    transformer = _megatron("megatron.core.transformer.transformer_config")
    return transformer.TransformerConfig(
        num_layers=settings.layer_count,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.inner_size,
        num_attention_heads=settings.head_count,
        num_query_groups=settings.group_count,
        kv_channels=settings.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=settings.epsilon,
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=settings.has_qkv_bias,
        qk_layernorm=settings.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )


def _block_spec(settings: GptSettings) -> Any:
    """Return of which modules a block is made: Megatron's local ones."""
    specs = _megatron("megatron.core.models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(
        qk_layernorm=settings.has_qk_norm, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _be_alone(device: torch.device) -> None:
    """Set up the groups that Megatron asks for everywhere, of this process alone."""
    dist = cast("Any", torch.distributed)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    state = _megatron("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()


def _megatron(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"the Megatron adapter needs {error.name}: pip install 'astraflow[megatron]'",
        ) from error
