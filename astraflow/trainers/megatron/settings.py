"""How Megatron is told what a Hugging Face `config.json` says."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
