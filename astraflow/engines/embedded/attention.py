"""Attention of decode steps on a GPU: every row to as many keys as it has, in place.

Transformers repeats keys and values for each query head that shares them, and attends to masked
columns as well: of a step over many rows that is most of the time. Torch's flash attention reads
rows of any length, and groups of heads, where they lie in the cache; prompts are left to `sdpa`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

_NAME: Final = "astraflow_decode"
# What layers may ask of attention that is not done here.
_STRANGE: Final = ("softcap", "s_aux", "position_bias")
_WIDEST: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedRows:
    """How many keys each row of a step has.

    Attributes:
        lengths: i32[rows], the newest token's among them.
        has_windows: Whether some layers may attend to the last keys alone: they have to say so.
    """

    lengths: Tensor
    has_windows: bool
    _starts: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @contextmanager
    def attending(self) -> Generator[None]:
        """Be what the layers of a module attend by in a block."""
        before = _ROWS.set(self)
        try:
            yield
        finally:
            _ROWS.reset(before)

    def takes(self, query: Tensor, asked: dict[str, Any]) -> bool:
        size = query.shape[-1]
        return (
            query.shape[2] == 1
            and query.dtype in (torch.bfloat16, torch.float16)
            and size % 8 == 0
            and size <= _WIDEST
            and not any(asked.get(name) is not None for name in _STRANGE)
            and ("sliding_window" in asked or not self.has_windows)
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Return f[rows, 1, heads, D] of f[rows, heads, 1, D] and f[rows, key heads, length, D].

        Rows of the cache are [key heads, columns, D] each, and lie one behind the other: to the
        kernel they are keys of one sequence that has `key heads * columns` places for every row.
        """
        rows, heads, columns = key.shape[:3]
        step = key.stride(0) // key.stride(2)
        span = (rows - 1) * step + key.stride(1) // key.stride(2)
        shape, strides = (span, heads, key.shape[3]), (key.stride(2), key.stride(1), 1)
        left, right = (-1, -1) if window is None else (window - 1, 0)
        found = cast("Any", torch.ops.aten)._flash_attention_forward(  # noqa: SLF001 - no other
            query[:, :, 0],
            key.as_strided(shape, strides),
            value.as_strided(shape, strides),
            self._every(1, rows),
            self._every(step, rows),
            1,
            columns,
            0.0,
            is_causal=False,
            return_debug_mask=False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=self.lengths,
        )
        return found[0][:, None]

    def _every(self, step: int, rows: int) -> Tensor:
        """Return where each row begins, i32[rows + 1]."""
        if step not in self._starts:
            device = self.lengths.device
            self._starts[step] = step * torch.arange(rows + 1, dtype=torch.int32, device=device)
        return self._starts[step]


_ROWS: ContextVar[DecodedRows | None] = ContextVar("decoded rows", default=None)


def _attention(  # noqa: PLR0917 - as transformers calls it
    plain: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    rows = _ROWS.get()
    if rows is None or not rows.takes(query, asked):
        return plain(module, query, key, value, attention_mask, scaling=scaling, **asked)
    return rows.attend(query, key, value, scaling, asked.get("sliding_window")), None


def adopt(module: nn.Module) -> None:
    """Have the attention of a model know decoded rows; without them it is `sdpa`, as before."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - seconds

    if cast("Any", module).config._attn_implementation != "sdpa":  # noqa: SLF001 - no other name
        return
    attention, mask = cast("Any", AttentionInterface), cast("Any", AttentionMaskInterface)
    attention.register(_NAME, partial(_attention, attention()["sdpa"]))
    mask.register(_NAME, mask()["sdpa"])
    cast("Any", module).set_attn_implementation(_NAME)
