"""Transformer blocks: in which type they compute, and what of them waits for the gradient."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, cast

import structlog
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from astraflow.config.policies import Fsdp
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import TORCH_TYPES

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Tokens of a pass that is not worth compiling for.
_FEW: Final = 16


def resolved(settings: Fsdp, device: torch.device) -> Fsdp:
    """Return the settings with what a device decides: a GPU computes in bf16, and recomputes."""
    is_gpu = device.type == "cuda"
    compute = settings.compute
    if compute == "auto":
        compute = "bf16" if is_gpu else "f32"
    recomputes = settings.checkpointing
    return settings.model_copy(
        update={
            "compute": compute,
            "checkpointing": is_gpu if recomputes is None else recomputes,
        }
    )


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks: the longest list of layers.

    Raises:
        AstraflowError: CAPABILITY_MISSING when there is none.
    """
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each)]
    if not lists:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"{type(module).__name__} has no list of blocks; train it with ranks: 1, fsdp.compute: "
            "f32 and fsdp.checkpointing: false",
        )
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters())))


def require_shareable(module: nn.Module, key: str, count: int, why: Iterable[str]) -> None:
    """Refuse to share a model out as `fsdp.KEY` says where there is a reason against it.

    Each reason is named once.

    Raises:
        AstraflowError: CAPABILITY_MISSING when there is a reason.
    """
    if reasons := ", ".join(dict.fromkeys(why)):
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"fsdp.{key}: {count} does not go with {type(module).__name__}: {reasons}; take 1",
        )


def prepare_blocks(module: nn.Module, settings: Fsdp, *, kept_tokens: int = 0) -> None:
    """Have the blocks of a model that is whole here, in f32, compute as FSDP2 would have them.

    Master weights and their gradients stay f32: the copies in bf16 are there for one block at a
    time. Embeddings, the last norm and the output layer compute in f32. The settings are resolved;
    passes of up to `kept_tokens` are not computed again, though others are.

    Raises:
        AstraflowError: CAPABILITY_MISSING when it has no blocks that are known.
    """
    is_plain = settings.compute == "f32" and not (settings.checkpointing or settings.compile)
    blocks = [] if is_plain else blocks_of(module)
    for block in blocks:
        if settings.compile:
            compile_block(block)
        if settings.compute != "f32":
            _compute_in(block, TORCH_TYPES[settings.compute], is_last=block is blocks[-1])
        if settings.checkpointing:
            recompute(block, kept_tokens=kept_tokens)


@cache
def can_compile(device: torch.device) -> bool:
    """Whether torch compiles for a device here: it takes a C compiler, and Triton on a GPU."""
    try:
        cast("Any", torch).compile(torch.exp)(torch.ones(8, device=device))
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        log.warning(
            "blocks run slower than they could: torch cannot compile for this device",
            device=str(device),
            why=str(error).strip().partition("\n")[0],
        )
        return False
    return True


def compile_block(block: nn.Module) -> None:
    """Have a block run as torch compiles it: once, for passes of any size and all blocks like it.

    Passes of a few tokens, by which models are asked what they can, run as they are.
    """
    plain = block.forward
    compiled: Callable[..., Any] = cast("Any", torch).compile(plain, dynamic=True)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = plain if _token_count(hidden_states) <= _FEW else compiled
        return run(hidden_states, *args, **kwargs)

    block.forward = forward


def recompute(block: nn.Module, *, kept_tokens: int = 0) -> None:
    """Have a block keep its inputs alone, and compute the rest again for its gradient.

    Passes of up to `kept_tokens` tokens, padding among them, keep all.
    """
    again: Callable[..., Any] = cast("Any", torch.utils.checkpoint).checkpoint
    plain = block.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _token_count(hidden_states) <= kept_tokens:
            return plain(hidden_states, *args, **kwargs)
        kwargs = {"use_reentrant": False, "preserve_rng_state": False, **kwargs}
        return again(plain, hidden_states, *args, **kwargs)

    block.forward = forward


def _token_count(hidden_states: Tensor) -> int:
    return hidden_states[..., 0].numel()


def _compute_in(block: nn.Module, dtype: torch.dtype, *, is_last: bool) -> None:
    """Have a block compute in another type than its weights are kept in.

    What goes in is rounded too, and what the last block says is f32 again, as with FSDP2's
    MixedPrecisionPolicy.
    """
    plain, slots = block.forward, slots_of(block, [name for name, _ in block.named_parameters()])

    def forward(*args: Any, **kwargs: Any) -> Any:
        given, named = tree_map(partial(_cast, dtype), (args, kwargs))
        with holding(slots, [own[name].to(dtype) for own, name in slots]):
            found = plain(*given, **named)
        return tree_map(partial(_cast, torch.float32), found) if is_last else found

    block.forward = forward


Slot = tuple[dict[str, Any], str]
"""Where a module has one of its parameters."""


def slots_of(module: nn.Module, names: Iterable[str]) -> list[Slot]:
    """Return where parameters are, by their names in a module."""
    slots: list[Slot] = []
    for name in names:
        path, _, own = name.rpartition(".")
        # What modules look into: torch's functional_call takes as long as some of their layers.
        slots.append((cast("Any", module.get_submodule(path))._parameters, own))  # noqa: SLF001
    return slots


@contextmanager
def holding(slots: Sequence[Slot], weights: Sequence[Tensor]) -> Generator[None]:
    """Have a module compute with other weights than its own in a block, one for each slot."""
    held = [own[name] for own, name in slots]
    try:
        for (own, name), weight in zip(slots, weights, strict=True):
            own[name] = weight
        yield
    finally:
        for (own, name), parameter in zip(slots, held, strict=True):
            own[name] = parameter


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """Return a tensor of floats in a type; anything else as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
