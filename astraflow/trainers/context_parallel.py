"""Context parallelism: several ranks have a part of every row each, and meet in attention.

Between two layers of attention a token needs nobody. In attention each rank has all tokens, and
some of the heads: what a rank has is exchanged before and after it (Ulysses, arXiv 2309.14509).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from astraflow.core.errors import AstraflowError
from astraflow.engines.modules import length_bounds
from astraflow.trainers.blocks import require_shareable
from astraflow.trainers.likelihood import PassTokens
from astraflow.trainers.tensors import to_tensor

_NAME: Final = "ulysses"


class RowGroup(ABC):
    """This rank among some that have the same rows, and compute a part of what is to be computed.

    Attributes:
        rank: 0 .. count - 1.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    @abstractmethod
    def part_of(self, one: PassTokens) -> tuple[PassTokens, np.ndarray]:
        """Return what this rank has of a pass, and which of its loss tokens these are, i64[k]."""

    def model_inputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return what a model takes beside the tokens that lie here."""
        del tokens
        return {}

    def joined(self, values: Tensor, here: np.ndarray, count: int) -> Tensor:
        """Return f[count], the values of all ranks, each of which has the gradient of its own.

        Args:
            values: f[k], of this rank.
            here: i64[k], where each belongs.
            count: Of all values.
        """
        places = to_tensor(here, values.device)
        whole = values.new_zeros(count).index_copy(0, places, values)
        return summed(whole, self._group) if count else whole


class ContextParallel(RowGroup):
    """This rank among those that share every row; the first has the rows' beginnings."""

    def adopt(self, module: nn.Module, *, part_count: int) -> None:
        """Have the attention of a model meet the other ranks.

        Args:
            module: A causal model of transformers.
            part_count: Ranks that have a part of the heads of each layer already.

        Raises:
            AstraflowError: CAPABILITY_MISSING for a model whose layers do not all attend to
                everything before, or with heads that cannot be shared out.
        """
        from transformers import AttentionInterface  # noqa: PLC0415 - seconds to import

        from astraflow.engines.embedded.model import (  # noqa: PLC0415 - loads the engine
            read_architecture,
        )

        model = cast("Any", module)
        config = model.config.get_text_config()
        try:
            why = "layers attend to a window" if read_architecture(model.config).window else ""
        except (AstraflowError, AttributeError) as error:
            why = str(error)
        if length_bounds(config):
            why = "positions are scaled by the longest row, of which a rank has a part"
        heads = config.num_attention_heads // part_count
        if heads % self.count:
            why = f"{heads} heads"
        require_shareable(module, "context_parallel", self.count, [why] if why else [])
        cast("Any", AttentionInterface).register(_NAME, self.attend)
        model.set_attn_implementation(_NAME)

    def model_inputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return where the tokens that lie here stand in their rows, i64[1, L]."""
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device) + self.rank * length
        return {"position_ids": places[None]}

    def part_of(self, one: PassTokens) -> tuple[PassTokens, np.ndarray]:
        """Return what lies here of a pass, and which of its loss tokens these are, i64[k].

        Rows are padded to a length that all ranks have the same part of.
        """
        count, length = one.tokens.shape
        part = -(-length // self.count)
        first = self.rank * part
        sources = first + np.minimum(np.arange(part, dtype=np.int64), max(0, length - 1 - first))
        sources = np.minimum(sources, length - 1)
        row, place = np.divmod(one.chosen, length)
        here = np.flatnonzero(place // part == self.rank)
        routes = one.routed_experts
        if routes is not None:
            rows = routes.reshape(count, length, *routes.shape[1:])
            routes = rows[:, sources].reshape(-1, *routes.shape[1:])
        cut = replace(
            one.where(here),
            tokens=np.ascontiguousarray(one.tokens[:, sources]),
            chosen=row[here] * part + place[here] - first,
            routed_experts=routes,
        )
        return cut, here

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend to all tokens before, as transformers calls it.

        Args:
            module: The layer.
            query: f[n, heads, L, D], of the tokens that lie here.
            key: f[n, key heads, L, D].
            value: f[n, key heads, L, D].
            attention_mask: None.
            scaling: Of scores.

        Returns:
            f[n, L, heads, D], and no weights.
        """
        del attention_mask, module
        heads, key_heads = query.shape[1], key.shape[1]
        if key_heads % self.count:
            key, value = (each.repeat_interleave(heads // key_heads, 1) for each in (key, value))
        query, key, value = (self._by_heads(each) for each in (query, key, value))
        found = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self._by_tokens(found), None

    def _by_heads(self, states: Tensor) -> Tensor:
        """Turn f[n, heads, L, D] of this rank's tokens into f[n, heads / c, c L, D] of all."""
        n, heads, length, size = states.shape
        parts = states.view(n, self.count, heads // self.count, length, size)
        # By the rank that it goes to; then by the rank that it came from.
        found = self._exchange(parts.permute(1, 0, 2, 3, 4))
        return found.permute(1, 2, 0, 3, 4).reshape(n, heads // self.count, -1, size)

    def _by_tokens(self, states: Tensor) -> Tensor:
        """Turn f[n, heads / c, c L, D] of all tokens into f[n, L, heads, D] of this rank's."""
        n, heads, length, size = states.shape
        parts = states.view(n, heads, self.count, length // self.count, size)
        found = self._exchange(parts.permute(2, 0, 1, 3, 4))
        return found.permute(1, 3, 0, 2, 4).reshape(n, length // self.count, -1, size)

    def _exchange(self, parts: Tensor) -> Tensor:
        return cast("Any", _Exchange).apply(parts.contiguous(), self._group)


class _Exchange(torch.autograd.Function):
    """Part i goes to rank i, and in its place comes that of rank i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts)
        cast("Any", dist).all_to_all_single(found, parts, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        # Of other strides the memory would come in another order.
        parts = upstream[0].contiguous()
        found = torch.empty_like(parts)
        cast("Any", dist).all_to_all_single(found, parts, group=ctx.group)
        return found, None


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks; all make the same of it, so each passes its own gradient on."""
    return cast("Any", _Summed).apply(values, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        del ctx
        found = values.clone()
        cast("Any", dist).all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        del ctx
        return upstream[0], None
