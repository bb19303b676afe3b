"""Tensor parallelism: several ranks have the same rows, and a part of every matrix of a block.

A block's projections to heads and to the feed-forward width are cut by what they make, those back
by what they take, so a block sums over the ranks twice (Megatron-LM, arXiv 1909.08053). Parameters
are DTensors of whole matrices; a module computes with what lies here of them. Outside of blocks
each rank has a part of the loss tokens instead, as if it had rows of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from astraflow.trainers.blocks import holding, require_shareable, slots_of
from astraflow.trainers.context_parallel import RowGroup, summed
from astraflow.trainers.likelihood import PassTokens

# As transformers calls them in its plans: cut by outputs, cut by inputs, and whole with a gradient
# that every rank has a part of.
_COLUMNS: Final = "colwise"
_ROWS: Final = "rowwise"
_IN_PARTS: Final = "replicated_with_grad_allreduce"
_STYLES: Final = (_COLUMNS, _ROWS, _IN_PARTS)


class TensorParallel(RowGroup):
    """This rank among those that share every matrix of a block."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.get_group())
        self._mesh = mesh
        self._plan: Mapping[str, str] = {}
        self._copied: tuple[Tensor | None, Tensor | None] = (None, None)

    def adopt(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Take the plan of a model that is whole, and have its blocks begin and end for all ranks.

        These are what `cut` cuts.

        Raises:
            AstraflowError: CAPABILITY_MISSING for a model without a plan that is known, or with
                heads that cannot be shared out.
        """
        config = cast("Any", module).config.get_text_config()
        plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        self._plan = {name.partition(".*.")[2]: style for name, style in plan.items()}
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        why = [] if heads % self.count == 0 else [f"{heads} heads"]
        why += [] if key_heads % self.count == 0 else [f"{key_heads} key heads"]
        why += [each for block in blocks for each in self._unfit(block)]
        require_shareable(module, "tensor_parallel", self.count, why)
        blocks[0].register_forward_pre_hook(self._enter)
        blocks[-1].register_forward_hook(self._leave)

    def _unfit(self, block: nn.Module) -> Iterator[str]:
        """Yield what of a block has no plan that is known."""
        styles = {path: self._plan.get(path, "") for path, _ in _owners(block)}
        if not {_COLUMNS, _ROWS} <= {*styles.values()}:
            yield "its layers have no plan in transformers"
        beside = {path.rpartition(".")[0] for path, each in styles.items() if each == _COLUMNS}
        for path, each in _owners(block):
            style, (around, _, _) = styles[path], path.rpartition(".")
            if style and style not in _STYLES:
                yield f"{path} is {style}"
            if not style and around in beside:
                yield f"{path} has no plan"
            if style == _COLUMNS and (rows := each.get_parameter("weight").shape[0]) % self.count:
                yield f"{path} has {rows} rows"

    def cut(self, block: nn.Module) -> None:
        """Make the parameters of a block DTensors, and have it compute with what lies here."""
        for path, each in _owners(block):
            self._cut(each, self._style(path), talks=path in self._plan)

    def _style(self, path: str) -> str:
        """Return how a module is cut; of an adapter's two factors one as the layer beside it."""
        around, _, name = path.rpartition(".")
        layer = self._plan.get(around)
        if layer is None:
            return self._plan.get(path, "")
        return layer if (name == "lora_B") == (layer == _COLUMNS) else _IN_PARTS

    def _cut(self, module: nn.Module, style: str, *, talks: bool) -> None:
        own = dict(module.named_parameters(recurse=False))
        for name, given in own.items():
            is_cut = style == _COLUMNS or (style == _ROWS and name == "weight")
            placement = Shard(0 if style == _COLUMNS else 1) if is_cut else Replicate()
            cut = distribute_tensor(given.detach(), self._mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, given.requires_grad))
        plain, slots = module.forward, slots_of(module, own)

        def forward(states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if talks and style == _COLUMNS:
                states = self._copy(states)
            with holding(slots, [self._here(module, name, style) for name in own]):
                found = plain(states, *args, **kwargs)
            return summed(found, self._group) if talks and style == _ROWS else found

        module.forward = forward

    def _here(self, module: nn.Module, name: str, style: str) -> Tensor:
        """Return what lies here of a parameter; a bias that all ranks add is a share of it."""
        given: Any = getattr(module, name)
        is_shared = style == _ROWS and name == "bias"
        if not (is_shared or style == _IN_PARTS):
            return given.to_local()
        here = given.to_local(grad_placements=[Partial()])
        return here / self.count if is_shared else here

    def _copy(self, states: Tensor) -> Tensor:
        """Return what a layer takes; the gradients that it has on all ranks are summed.

        Layers that take the same share one sum.
        """
        if self._copied[0] is not states:
            self._copied = states, cast("Any", _Copied).apply(states, self._group)
        return cast("Tensor", self._copied[1])

    def _enter(self, _block: nn.Module, args: tuple[Any, ...]) -> None:
        """Before blocks every rank computes the same, and the gradients of ranks are summed."""
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(self._shared)

    def _shared(self, gradient: Tensor) -> Tensor:
        return gradient / self.count

    def _leave(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        """After blocks every rank has the gradient of its own loss tokens."""
        self._copied = None, None
        copy = cast("Any", _Copied).apply
        if isinstance(output, tuple):
            states, *others = cast("tuple[Any, ...]", output)
            return (copy(states, self._group), *others)
        return copy(output, self._group)

    def part_of(self, one: PassTokens) -> tuple[PassTokens, np.ndarray]:
        """Return a pass with this rank's loss tokens, and which these are, i64[k]."""
        here = np.array_split(np.arange(len(one.targets)), self.count)[self.rank]
        return replace(one.where(here), chosen=one.chosen[here]), here


def _owners(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block that have parameters of their own, by their paths."""
    for path, each in cast("Any", block).named_modules():
        if any(True for _ in each.parameters(recurse=False)):
            yield path, each


class _Copied(torch.autograd.Function):
    """The same, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        found = upstream[0].contiguous().clone()
        cast("Any", torch.distributed).all_reduce(found, group=ctx.group)
        return found, None
