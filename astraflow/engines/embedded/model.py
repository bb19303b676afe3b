"""Models: the module that computes, without weights of a run at first."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import AutoConfig, PretrainedConfig

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.embedded.shapes import row_step
from astraflow.engines.making import make_causal_model
from astraflow.engines.products import use_onednn

_FULL = "full_attention"
_SLIDING = "sliding_attention"
# Dense decoders: their forward passes have no branch on data.
_STATIC = frozenset(("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"))
_STATIC_ROPE = frozenset((None, "default", "linear", "llama3", "yarn"))


class Output(Protocol):
    """What a causal model of transformers returns."""

    logits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the engine reads of a model's config.

    Attributes:
        vocab_size: Ids that it knows.
        layer_count: Attention layers.
        max_context: Positions that it was made for.
        window: Keys that a sliding layer attends to; None: no layer slides.
        layer_kinds: Names of the masks that its forward pass picks from; empty: one mask.
        row_step: What the number of computed rows is a multiple of.
        is_static: Whether its forward pass is known to do the same for all data.
    """

    vocab_size: int
    layer_count: int
    max_context: int
    window: int | None
    layer_kinds: frozenset[str]
    row_step: int
    is_static: bool


def load_config(model_dir: Path) -> PretrainedConfig:
    """Read the config of a Hugging Face directory.

    Raises:
        AstraflowError: INVALID_FIELD when there is none, or it is not understood.
    """
    if not (model_dir / "config.json").is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{model_dir / 'config.json'} does not exist; give a Hugging Face model directory",
        )
    try:
        return cast("Any", AutoConfig).from_pretrained(str(model_dir), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{model_dir / 'config.json'} is not understood: {error}"
        ) from error


def read_architecture(config: PretrainedConfig) -> Architecture:
    """Return what the engine needs to know.

    Raises:
        AstraflowError: INVALID_FIELD for layers that keep no keys and values.
    """
    fields = cast("Any", config).get_text_config()
    kinds: frozenset[str] = frozenset(getattr(fields, "layer_types", None) or ())
    if kinds - {_FULL, _SLIDING}:
        unknown = ", ".join(sorted(kinds - {_FULL, _SLIDING}))
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model type {fields.model_type} has layers of kind {unknown}; the embedded engine "
            "serves attention only",
        )
    window = getattr(fields, "sliding_window", None)
    return Architecture(
        vocab_size=fields.vocab_size,
        layer_count=fields.num_hidden_layers,
        max_context=fields.max_position_embeddings,
        window=window if not kinds or _SLIDING in kinds else None,
        layer_kinds=kinds,
        row_step=row_step(_widths(fields)),
        is_static=_is_static(fields),
    )


def _is_static(fields: Any) -> bool:
    """Return False where experts are chosen, or positions scaled, by what is seen."""
    found: Any = getattr(fields, "rope_parameters", None) or getattr(fields, "rope_scaling", None)
    rope: dict[str, Any] = found or {}
    # Models of several layer kinds have one entry per kind.
    parts: list[dict[str, Any]] = [
        rope,
        *(cast("Any", part) for part in rope.values() if isinstance(part, dict)),
    ]
    kinds = {part.get("rope_type") for part in parts}
    return fields.model_type in _STATIC and kinds <= _STATIC_ROPE


def _widths(fields: Any) -> list[int]:
    """Return the widths of what elementwise functions see."""
    hidden: int = fields.hidden_size
    head = getattr(fields, "head_dim", None) or hidden // fields.num_attention_heads
    inner = getattr(fields, "intermediate_size", None) or 4 * hidden
    expert = getattr(fields, "moe_intermediate_size", None) or inner
    return [hidden, head, inner, expert]


def build_module(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """Make the module of a config; its weights mean nothing yet."""
    module = use_onednn(make_causal_model(config, dtype=dtype))
    return module.to(device).eval().requires_grad_(requires_grad=False)


def twin_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module like this one with parameters of its own that share the memory."""
    shared: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(parameter.data, requires_grad=False)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, shared)


class StepMasks:
    """Additive masks of a pass over what follows, in the form that the model takes."""

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype) -> None:
        self._window = architecture.window
        self._kinds = architecture.layer_kinds
        self._zero = torch.zeros((), dtype=dtype)
        self._closed = torch.full((), -torch.inf, dtype=dtype)
        self._columns = torch.empty(0, dtype=torch.long)

    def of(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return [rows, 1, n, length]: what each row's n newest tokens may attend to.

        Args:
            positions: i64[rows, n], of the newest tokens.
            length: Columns of the cache that take part.
        """
        if len(self._columns) < length or self._columns.device != positions.device:
            self._columns = torch.arange(2 * length, device=positions.device)
            self._zero = self._zero.to(positions.device)
            self._closed = self._closed.to(positions.device)
        columns, positions = self._columns[:length], positions[..., None]
        seen = columns <= positions
        if self._window is None:
            full = self._additive(seen)
            return dict.fromkeys(self._kinds, full) if len(self._kinds) > 1 else full
        sliding = self._additive(seen & (columns > positions - self._window))
        if len(self._kinds) > 1:
            return {_FULL: self._additive(seen), _SLIDING: sliding}
        return sliding

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, self._zero, self._closed)[:, None]
