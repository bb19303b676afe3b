"""Models: the module that computes, and its decode step as a function of tensors.

For a small model the Python of its forward pass takes longer than the arithmetic, and holds the
interpreter lock meanwhile. Where nothing in that Python depends on data, the step is recorded
once by TorchScript, weights as inputs, and replayed for every row count, length and version.
A recording is used only if its bits equal those of the module at another shape too. On a GPU, where
hundreds of launches take longer than what they start, it is captured as a CUDA graph.
"""

import copy
import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from torch.nn.functional import pad
from transformers import AutoConfig, PretrainedConfig, masking_utils
from transformers.cache_utils import Cache

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.embedded import attention
from astraflow.engines.embedded.cache import PassLayer
from astraflow.engines.embedded.graphs import StepGraphs
from astraflow.engines.embedded.shapes import row_step
from astraflow.engines.modules import (
    fuse_norms,
    length_bounds,
    make_causal_model,
    ropes_of,
    use_onednn,
)

# Transformers 5.24 renamed the argument of all its models, and of what makes their masks.
_MASK_INPUTS = inspect.signature(cast("Any", masking_utils).create_causal_mask).parameters
_CACHE = "cache" if "cache" in _MASK_INPUTS else "past_key_values"

_FULL = "full_attention"

_SLIDING = "sliding_attention"

# Dense decoders: their forward passes have no branch on data.
_STATIC = frozenset(("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"))

_STATIC_ROPE = frozenset((None, "default", "linear", "llama3", "yarn"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the engine reads of a model's config.

    Attributes:
        vocab_size: Ids that it knows.
        layer_count: Attention layers.
        max_context: Positions that it was made for; with longrope those before all rows of a pass
            with a longer one have other frequencies.
        window: Keys that a sliding layer attends to; None: no layer slides.
        layer_kinds: Names of the masks that its forward pass picks from; empty: one mask.
        row_step: What the number of computed rows is a multiple of.
        is_static: Whether its forward pass is known to do the same for all data.
        dtype: Of its weights, as torch names it; None: its config does not say.
    """

    vocab_size: int
    layer_count: int
    max_context: int
    window: int | None
    layer_kinds: frozenset[str]
    row_step: int
    is_static: bool
    dtype: str | None = None


# Tried: rows of different lengths are not what each is by itself, or cannot be computed.
_UNSERVED = frozenset({"codegen", "deepseek_v2"})


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
        AstraflowError: INVALID_FIELD for layers that keep no keys and values, and for positions
            that are told by distance.
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
    if fields.model_type in _UNSERVED:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"the embedded engine does not compute model type {fields.model_type} as transformers"
            " does; take raas.engine.kind vllm or sglang",
        )
    if getattr(fields, "alibi", False) or not hasattr(fields, "max_position_embeddings"):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model type {fields.model_type} tells positions by distance (ALiBi), or says nothing"
            " of them; the embedded engine serves numbered positions only: take raas.engine.kind"
            " vllm or sglang",
        )
    window = getattr(fields, "sliding_window", None)
    return Architecture(
        vocab_size=fields.vocab_size,
        layer_count=fields.num_hidden_layers,
        max_context=min([fields.max_position_embeddings, *length_bounds(fields)]),
        window=window if not kinds or _SLIDING in kinds else None,
        layer_kinds=kinds,
        row_step=row_step(_widths(fields)),
        is_static=_is_static(fields),
        dtype=None if fields.dtype is None else str(fields.dtype).removeprefix("torch."),
    )


def _is_static(fields: Any) -> bool:
    """Return False where experts are chosen, or positions scaled, by what is seen."""
    kinds = {part.get("rope_type") for part in ropes_of(fields)}
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
    module = use_onednn(make_causal_model(config, dtype=dtype, is_empty=True))
    if device.type == "cuda":
        # It takes a plan of its own, and a tenth of a second, for each number of rows and columns.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        fuse_norms(module)
        if read_architecture(config).is_static:
            attention.adopt(module)
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


Masks = torch.Tensor | Mapping[str, torch.Tensor]

_Inputs = tuple[torch.Tensor, ...]

# torch records one function at a time.
_RECORDING = threading.Lock()

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Stepper:
    """Runs decode steps for all modules of one architecture."""

    def __init__(self, *, is_recordable: bool) -> None:
        self._may_record = is_recordable
        self._recorded: Any = None
        self._graphs = StepGraphs() if is_recordable else None

    def run(
        self,
        module: torch.nn.Module,
        *,
        parameters: Sequence[torch.Tensor],
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        states: Sequence[torch.Tensor],
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of each row's next token, [rows, vocabulary].

        Args:
            module: A causal model of transformers.
            parameters: All of the module.
            ids: i64[rows], the newest tokens.
            positions: i64[rows], where they stand; their keys and values are written there.
            masks: [rows, 1, 1, length] each: what they may attend to.
            states: [rows, heads, length, head size]: keys, then values, of each layer in turn.
            shares: [rows, ranks]: which adapters each row takes; None: there are none.
        """
        kinds = tuple(masks) if isinstance(masks, Mapping) else ()
        given = tuple(masks.values()) if isinstance(masks, Mapping) else (masks,)
        rows = torch.arange(len(ids), device=ids.device)
        taken = ids.new_empty(len(ids), 0) if shares is None else shares
        inputs = (ids, positions, rows, taken, *given, *states)
        if self._graphs is not None and ids.is_cuda:
            return self._graphs.run(
                partial(_forward_rows, module, states, kinds),
                (ids, positions, rows, taken, *given),
                (*parameters, *states),
            )
        if self._may_record:
            self._may_record = False
            self._recorded = _recorded(module, inputs, kinds)
        if self._recorded is not None:
            return self._recorded(*parameters, *inputs)
        return _forward(module, inputs, kinds)


def logits_of(
    module: torch.nn.Module, cache: Cache, *, shares: torch.Tensor | None, **inputs: Any
) -> torch.Tensor:
    """Run a causal model of transformers over a cache; return its logits, [rows, k, vocabulary]."""
    if shares is not None:
        cast("Any", module).adapter_shares.of_rows = shares
    return module(**{_CACHE: cache}, **inputs, use_cache=True).logits


def cache_over(
    states: Sequence[torch.Tensor], rows: torch.Tensor, positions: torch.Tensor
) -> Cache:
    """Return the cache of a pass over what follows in rows whose beginnings were read.

    Args:
        states: [rows, heads, length, head size]: keys, then values, of each layer in turn.
        rows: i64[rows], 0 and so on.
        positions: i64[rows, n], of the n tokens: their keys and values are written there.
    """
    pairs = zip(states[::2], states[1::2], strict=True)
    return Cache(
        layers=[
            PassLayer(partial(_write_at, each, rows[:, None], positions), each[0]) for each in pairs
        ]
    )


def _write_at(
    states: Sequence[torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
    *given: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Write new states in place where the newest tokens stand; return all."""
    for kept, new in zip(states, given, strict=True):
        kept[rows, :, positions] = new.transpose(1, 2)
    return states


def _forward(module: torch.nn.Module, inputs: _Inputs, kinds: tuple[str, ...]) -> torch.Tensor:
    ids, positions, rows, taken, *others = inputs
    mask_count = max(1, len(kinds))
    masks, states = others[:mask_count], others[mask_count:]
    logits = logits_of(
        module,
        cache_over(states, rows, positions[:, None]),
        shares=taken if hasattr(module, "adapter_shares") else None,
        input_ids=ids[:, None],
        position_ids=positions[:, None],
        attention_mask=dict(zip(kinds, masks, strict=True)) if kinds else masks[0],
    )
    return logits[:, -1]


def _forward_rows(
    module: torch.nn.Module,
    states: Sequence[torch.Tensor],
    kinds: tuple[str, ...],
    given: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Do a step in which every row attends to its own keys alone."""
    fields = cast("Any", module).config.get_text_config()
    has_windows = getattr(fields, "sliding_window", None) is not None
    rows = attention.DecodedRows(lengths=(given[1] + 1).int(), has_windows=has_windows)
    with rows.attending():
        return _forward(module, (*given, *states), kinds)


def _recorded(module: torch.nn.Module, inputs: _Inputs, kinds: tuple[str, ...]) -> Any:
    """Return the step as a function of parameters and inputs; None where that is not possible."""
    parameters = tuple(module.parameters())
    bare, places = _bare(module)

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        for owner, name, index in places:
            setattr(owner, name, tensors[index])
        return _forward(bare, tensors[len(parameters) :], kinds)

    try:
        with _RECORDING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded = cast("Any", torch.jit).trace(
                step, (*parameters, *_copied(inputs)), check_trace=False
            )
        is_same = all(
            _agree(recorded, module, each, kinds) for each in (inputs, _larger(inputs, kinds))
        )
    except Exception as error:  # noqa: BLE001  whatever torch cannot record, the module can run
        log.info("decode step is not recorded", why=str(error).partition("\n")[0])
        return None
    if not is_same:
        log.info("decode step is not recorded", why="its bits would differ from the model's")
        return None
    return recorded


def _bare(module: torch.nn.Module) -> tuple[torch.nn.Module, list[tuple[Any, str, int]]]:
    """Return a twin without parameters, and where each belongs: owner, name, index."""
    twin = twin_of(module)
    indexes: dict[int, int] = {}
    places: list[tuple[Any, str, int]] = []
    for path, parameter in list(twin.named_parameters(remove_duplicate=False)):
        owner, _, name = path.rpartition(".")
        index = indexes.setdefault(id(parameter), len(indexes))
        places.append((twin.get_submodule(owner), name, index))
    for owner, name, _ in places:
        delattr(owner, name)
    return twin, places


def _agree(recorded: Any, module: torch.nn.Module, inputs: _Inputs, kinds: tuple[str, ...]) -> bool:
    """Return whether both make the same logits and the same states, to the last bit."""
    own, other = _copied(inputs), _copied(inputs)
    logits = _forward(module, own, kinds)
    again = recorded(*module.parameters(), *other)
    pairs = zip((logits, *own), (again, *other), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def _copied(inputs: _Inputs) -> _Inputs:
    return tuple(tensor.clone() for tensor in inputs)


def _larger(inputs: _Inputs, kinds: tuple[str, ...]) -> _Inputs:
    """Return inputs of twice the rows, and of 16 columns more that nothing attends to."""
    ids, positions, rows, taken, *others = (torch.cat([tensor, tensor]) for tensor in inputs)
    mask_count = max(1, len(kinds))
    masks = [pad(mask, (0, 16), value=-torch.inf) for mask in others[:mask_count]]
    states = [pad(state, (0, 0, 0, 16)) for state in others[mask_count:]]
    rows = torch.arange(len(rows), device=rows.device)
    return (ids, positions, rows, taken, *masks, *states)
