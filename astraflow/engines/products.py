"""Products of f32 matrices on a CPU, by the faster of the two libraries that torch brings.

torch gives f32 products to MKL, which on processors of other makers than Intel keeps to AVX2. Where
such a processor has AVX-512, oneDNN, which torch brings for other work, takes half the time (2.2
times as many products a second on a Zen 5 core), in f32 as well and just as exact. From two rows on
the bits of a row do not depend on how many others there are, as `embedded.shapes` needs it.
"""

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        return cast("Any", _Linear).apply(states, weight, bias)
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
        """Return [..., out]."""
        return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
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
