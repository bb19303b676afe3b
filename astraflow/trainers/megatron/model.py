"""A GPT of megatron-core with the weights of a Hugging Face directory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.megatron.naming import cut, hf_names, joined
from astraflow.trainers.megatron.settings import GptSettings, read_settings


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
