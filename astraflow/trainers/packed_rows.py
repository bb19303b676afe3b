"""Packed rows: all rows of a pass end to end, as one, in which attention ends where a row does.

No token is padding then. It is an attention of its own name for transformers: what is laid end to
end takes the place of the mask that a model makes for its layers. On a GPU it is torch's attention
of varying lengths, on the CPU that of each row alone. Whatever else mixes tokens (convolutions,
recurrent layers) does not know of rows: `CausalModel.unpacked` asks a model before.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.tensors import to_tensor

try:
    from torch.nn.attention import varlen
except ImportError:  # of older releases
    varlen = None

NAME: Final = "astraflow_packed"
# Before torch 2.12 keys of fewer heads are taken without being asked for.
_ASKS_FOR_GROUPS: Final = varlen and "enable_gqa" in signature(varlen.varlen_attn).parameters
# What layers may ask of attention that is not done here.
_STRANGE: Final = ("softcap", "s_aux", "position_bias", "cache")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Where rows end that are laid end to end.

    Attributes:
        lengths: Tokens of each row.
        longest: Tokens of the longest. Blocks that ask `lengths` are compiled for these alone.
        offsets: i32[n + 1], where each begins and the last one ends, on the device.
        window: Tokens that one attends to at most, itself among them; None: all before.
    """

    lengths: tuple[int, ...]
    longest: int
    offsets: Tensor
    window: int | None = None

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> "PackedRows":
        """Lay rows of these lengths, i64[n], end to end."""
        counts = tuple(map(int, lengths))
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(lengths=counts, longest=max(counts), offsets=to_tensor(ends, device))

    @property
    def positions(self) -> Tensor:
        """i64[1, T], of each token in its row."""
        places = np.concatenate([np.arange(each, dtype=np.int64) for each in self.lengths])
        return to_tensor(places[None], self.offsets.device)

    @contextmanager
    def masking(self) -> Generator[None]:
        """Be what the model has for a mask in a block."""
        before = _LAID.set(self)
        try:
            yield
        finally:
            _LAID.reset(before)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return f[1, T, heads, D] of f[1, heads, T, D] and f[1, key heads, T, D]."""
        if query.device.type == "cpu":
            return self._row_by_row(query, key, value, scale)
        if varlen is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING, "this torch has no attention of rows of any lengths"
            )
        width = value.shape[-1]
        if rest := query.shape[-1] - width:
            # The kernel has one size for all three.
            value = functional.pad(value, [0, rest])
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        is_grouped = query.shape[1] != key.shape[1]
        asked: Any = {"enable_gqa": True} if is_grouped and _ASKS_FOR_GROUPS else {}
        found = cast("Any", varlen).varlen_attn(
            *(query, key, value, self.offsets, self.offsets, self.longest, self.longest),
            scale=scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            **asked,
        )
        return cast("Tensor", found)[None, ..., :width]

    def _row_by_row(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend within each row, rows of one length that follow each other together."""
        found: list[Tensor] = []
        at = 0
        for length, same in groupby(self.lengths):
            count = len(list(same))
            span = slice(at, at + count * length)
            rows = [
                each[0, :, span].reshape(-1, count, length, each.shape[-1]).transpose(0, 1)
                for each in (query, key, value)
            ]
            mask = self._window_mask(length)
            made = functional.scaled_dot_product_attention(
                *rows,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            found.append(made.transpose(1, 2).flatten(0, 1))
            at = span.stop
        return torch.cat(found)[None]

    def _window_mask(self, length: int) -> Tensor | None:
        """Return bool[L, L], which token (row) sees which (column); None: all before."""
        if self.window is None or self.window >= length:
            return None
        index = torch.arange(length, device=self.offsets.device)
        behind = index[:, None] - index
        return (behind >= 0) & (behind < self.window)


_LAID: ContextVar[PackedRows | None] = ContextVar("packed rows", default=None)


def _mask(plain: Callable[..., Any], **asked: Any) -> Any:
    """Return what transformers asks for as a layer's mask; without packed rows a plain one."""
    rows = _LAID.get()
    if rows is None:
        return plain(**asked)
    size, config = asked.get("local_size"), asked.get("config")
    if asked.get("use_vmap") or size not in (None, getattr(config, "sliding_window", None)):
        raise AstraflowError(Reason.CAPABILITY_MISSING, "layers attend to parts of what was before")
    return replace(rows, window=size)


def _attention(  # noqa: PLR0917 - as transformers calls it
    plain: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it; under another mask than packed rows by plain attention."""
    if not isinstance(attention_mask, PackedRows):
        given = {"scaling": scaling, "dropout": dropout, **asked}
        return plain(module, query, key, value, attention_mask, **given)
    strange = [name for name in _STRANGE if asked.get(name) is not None]
    if strange or dropout:
        raise AstraflowError(Reason.CAPABILITY_MISSING, f"layers ask for {strange or 'dropout'}")
    return attention_mask.attend(query, key, value, scaling), None


def adopt(module: nn.Module) -> None:
    """Have the attention of a model know packed rows; without them it is `sdpa`, as before."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - seconds

    for interface, own in ((AttentionInterface, _attention), (AttentionMaskInterface, _mask)):
        known = cast("Any", interface)
        known.register(NAME, partial(own, known()["sdpa"]))
    cast("Any", module).set_attn_implementation(NAME)
