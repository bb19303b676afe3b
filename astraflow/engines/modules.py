"""Modules of transformers: made one at a time, their products, their adapted layers.

While it makes one, transformers changes what all threads share: the method that ties an output
layer to the embeddings does nothing, and torch's default type is the module's. Of two made at
once, one may come out with weights that have no memory, or in the other's type.

torch gives f32 products to MKL, which on processors of other makers than Intel keeps to AVX2. Where
such a processor has AVX-512, oneDNN, which torch brings for other work, takes half the time (2.2
times as many products a second on a Zen 5 core), in f32 as well and just as exact. From two rows on
the bits of a row do not depend on how many others there are, as `embedded.shapes` needs it.
"""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from astraflow.config.lora import Lora, is_target, require_targets
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODEL_LOCK = threading.Lock()

# Of transformers' lists of tensors.
_UNFIT = ("missing", "unexpected", "mismatched")


TORCH_TYPES: Final[Mapping[str, torch.dtype]] = {
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.F32: torch.float32,
    Dtype.F64: torch.float64,
}
"""What torch calls the floats of layouts, and of recipes."""

SCORE: Final = "score"
"""Name of a reward model's head, in the decoders of transformers."""


def device_of(name: str, *, key: str) -> torch.device:
    """Return a device by its name in a recipe, under a key; auto: a GPU where torch sees one.

    Raises:
        AstraflowError: INVALID_FIELD for a GPU that torch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{key} is {name}, and torch sees no GPU; take cpu"
        )
    return device


def length_bounds(fields: Any) -> list[int]:
    """Return up to which position the rows of a pass do not depend on the longest of them."""
    key = "original_max_position_embeddings"
    return [part[key] for part in ropes_of(fields) if part.get("rope_type") == "longrope"]


def ropes_of(fields: Any) -> list[dict[str, Any]]:
    """Return how positions are told; models of several layer kinds have one entry per kind."""
    found: Any = getattr(fields, "rope_parameters", None) or getattr(fields, "rope_scaling", None)
    rope: dict[str, Any] = found or {}
    return [rope, *(cast("Any", part) for part in rope.values() if isinstance(part, dict))]


def read_causal_model(
    directory: Path,
    *,
    dtype: torch.dtype | None,
    must_fit: bool = False,
    makes_scores: bool = False,
) -> torch.nn.Module:
    """Make the module of a Hugging Face directory, with its weights.

    Nothing is downloaded or executed.

    Args:
        directory: Where its config and weights are.
        dtype: Of all weights; None: the one that the directory names.
        must_fit: Whether a tensor too many or too few is an error; else what is missing is random.
        makes_scores: Whether one number takes the place of the logits; a head that is not there
            gets the same random weights each time.

    Raises:
        OSError, ValueError: It is no such directory, or of an architecture that this release of
            transformers does not know.
    """
    auto, kwargs = _auto_class(makes_scores=makes_scores)
    with _MODEL_LOCK:
        module, loaded = auto.from_pretrained(
            directory,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **kwargs,
        )
    if makes_scores:
        _with_scores(module, is_new=f"{SCORE}.weight" in loaded.get("missing_keys", ()))
    strange = [f"{name} is {what}" for what in _UNFIT for name in loaded.get(f"{what}_keys", ())]
    if must_fit and strange:
        raise ValueError("; ".join(sorted(strange)[:4]))
    return module


def make_causal_model(
    config: "PretrainedConfig", *, dtype: torch.dtype, is_empty: bool = False, auto: Any = None
) -> torch.nn.Module:
    """Make the module of a config, with random weights.

    Args:
        config: Of transformers.
        dtype: Of all weights.
        is_empty: Whether they are whatever memory holds. They take none until they are written:
            the system gives pages when they are touched.
        auto: The class of transformers that makes modules; None: of causal models.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds to import
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    drawing = cast("Any", no_init_weights)() if is_empty else nullcontext()
    with _MODEL_LOCK, drawing:
        module = (auto or cast("Any", AutoModelForCausalLM)).from_config(config, dtype=dtype)
    if is_empty:
        module.tie_weights()
    return module


def _auto_class(*, makes_scores: bool) -> tuple[Any, dict[str, Any]]:
    """Return the class of transformers that makes modules, and what it takes beside a config."""
    import transformers  # noqa: PLC0415 - seconds to import

    auto = cast("Any", transformers)
    if makes_scores:
        return auto.AutoModelForSequenceClassification, {"num_labels": 1}
    return auto.AutoModelForCausalLM, {}


def _with_scores(module: Any, *, is_new: bool) -> None:
    """Have a classifier of one label say it at every position, not at the last of a row alone.

    Raises:
        ValueError: Its head has another name, or takes more than the last layer says.
    """
    head = getattr(module, SCORE, None)
    if type(head) is not nn.Linear:
        raise ValueError(f"{type(module).__name__} has no linear layer '{SCORE}' for its head")
    if is_new:
        random = torch.Generator().manual_seed(0)
        spread: float = getattr(module.config.get_text_config(), "initializer_range", 0.02)
        nn.init.normal_(head.weight.data, std=spread, generator=random)

    def forward(**kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=head(module.base_model(**kwargs).last_hidden_state))

    module.forward = forward


def empty_causal_model(
    directory: Path, *, dtype: torch.dtype, makes_scores: bool = False
) -> torch.nn.Module:
    """Make the module of a Hugging Face directory whose weights are whatever memory holds.

    Raises:
        OSError, ValueError: As `read_causal_model`, but for its weights, which are not looked at.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - seconds to import

    auto, kwargs = _auto_class(makes_scores=makes_scores)
    config = cast("Any", AutoConfig).from_pretrained(directory, local_files_only=True, **kwargs)
    module = make_causal_model(config, dtype=dtype, is_empty=True, auto=auto)
    if makes_scores:
        _with_scores(module, is_new=False)
    return module


_CPU_INFO = Path("/proc/cpuinfo")


@cache
def onednn_is_faster() -> bool:
    """Whether f32 products are given to oneDNN on this machine."""
    if not (_CPU_INFO.is_file() and torch.backends.mkl.is_available()):
        return False
    flags = _CPU_INFO.read_text(errors="replace")
    if "GenuineIntel" in flags or "avx512f" not in flags:
        return False
    left, right = (torch.arange(96.0).sin().view(12, 8), torch.arange(32.0).cos().view(4, 8))
    try:
        return torch.allclose(_onednn(left, right, None), left @ right.T, rtol=1e-5, atol=1e-5)
    except (AttributeError, RuntimeError):
        # The operator is torch's own for compiled models: another release may have another.
        return False


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices, f[m, k] and f[k, n], without a gradient."""
    # oneDNN knows no products over nothing, such as the gradient of a weight that saw no row.
    has_terms = left.shape[1] > 0
    return _onednn(left, right.T, None) if has_terms and _is_ours(left, right) else left @ right


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, with its gradients."""
    if not _is_ours(states, weight):
        return functional.linear(states, weight, bias)
    if torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad):
        return cast("Any", _OnednnProduct).apply(states, weight, bias)
    return _onednn(states, weight, bias)


def use_onednn(module: nn.Module) -> nn.Module:
    """Let the linear layers of a module take the faster products, and return it."""
    if onednn_is_faster():
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = OnednnLinear
    return module


class OnednnLinear(nn.Linear):
    """A linear layer whose products are those of `linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return linear(input, self.weight, self.bias)


class _OnednnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return _onednn(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        pulls = upstream[0].flatten(0, -2)
        wanted = ctx.needs_input_grad
        return (
            product(pulls, weight).view(states.shape) if wanted[0] else None,
            product(pulls.T, states.flatten(0, -2)) if wanted[1] else None,
            pulls.sum(0) if ctx.has_bias and wanted[2] else None,
        )


class FusedRMSNorm(nn.Module):
    """An RMS norm of transformers in one kernel: sums in f32, rounded once at the end."""

    weight: Tensor
    fused_eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.fused_eps)


def fuse_norms(module: nn.Module) -> nn.Module:
    """Let the RMS norms of a module be one kernel each, those that are the plain ones; return it.

    On a GPU what transformers writes out reads and writes a layer's states six times over.
    """
    is_plain: dict[tuple[type[nn.Module], int], bool] = {}
    for norm in module.modules():
        kind, weight = type(norm), getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not kind.__name__.endswith("RMSNorm") or weight is None or not isinstance(eps, float):
            continue
        key = (kind, len(weight))
        if key not in is_plain:
            is_plain[key] = _is_plain_norm(norm, eps)
        if is_plain[key]:
            cast("Any", norm).__class__, cast("Any", norm).fused_eps = FusedRMSNorm, eps
    return module


def _is_plain_norm(norm: nn.Module, eps: float) -> bool:
    """Whether a norm, some of which add one to their weight, says what torch's does."""
    tried = copy.deepcopy(norm).to(device="cpu", dtype=torch.float32)
    count = len(cast("Tensor", tried.weight))
    weight, states = torch.linspace(0.5, 2, count), torch.arange(3.0 * count).sin().view(3, count)
    cast("Tensor", tried.weight).data = weight
    with torch.no_grad():
        expected = functional.rms_norm(states, (count,), weight, eps)
        return torch.allclose(tried(states), expected, rtol=1e-5, atol=1e-6)


def _is_ours(left: Tensor, right: Tensor) -> bool:
    is_f32 = left.dtype == right.dtype == torch.float32
    return is_f32 and left.device.type == "cpu" and onednn_is_faster()


def _onednn(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., n] of states [..., k] and a weight [n, k], of any strides.

    Nothing is added to the product, in the one form of the operator that TorchScript can record.
    """
    apply = cast("Any", torch.ops).mkldnn._linear_pointwise.binary  # noqa: SLF001 - no other name
    nothing = states.new_zeros((*states.shape[:-1], weight.shape[0]))
    return apply(states, nothing, weight, bias, "add")


LayerT = TypeVar("LayerT", bound=nn.Module)


class AdaptedLayer(OnednnLinear):
    """A linear layer that takes the place of another, with its parameters under their names."""

    def __init__(self, base: nn.Linear) -> None:
        cast("Any", super()).__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias


def target_layers(module: nn.Module, settings: Lora) -> dict[str, nn.Linear]:
    """Return the layers of a model that get an adapter, by their paths.

    Raises:
        AstraflowError: INVALID_FIELD for targets that name no linear layer of the model.
    """
    # The output layer is tied to the embeddings often.
    head = cast("Any", module).get_output_embeddings()
    layers = {path: each for path, each in layers_of(module, nn.Linear) if each is not head}
    require_targets(settings, layers, of="the model")
    return {path: layer for path, layer in layers.items() if is_target(path, settings)}


def layers_of(module: nn.Module, kind: type[LayerT]) -> Iterator[tuple[str, LayerT]]:
    for path, layer in cast("Any", module).named_modules():
        if isinstance(layer, kind):
            yield path, layer
