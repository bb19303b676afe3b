"""The KV cache: a slot per row, rows close together, ragged lengths; and kept prefixes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from astraflow.engines.embedded.shapes import grown


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, columns, head size].

    A forward pass over prompts writes to it; a decode step gets views.
    """

    def __init__(self, cache: "SlotCache") -> None:
        cast("Any", super()).__init__()
        self._cache = cache
        self._kept_keys = torch.empty(0)
        self._kept_values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shape, type and device from the first states."""
        self._kept_keys = self._sized(key_states)
        self._kept_values = self._sized(value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the states of prompts; return them: a prompt attends to itself."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        prompts = self._cache.prompts
        rows = slice(self._cache.first_row, self._cache.first_row + len(prompts))
        self._kept_keys[rows, :, :length] = key_states[prompts]
        self._kept_values[rows, :, :length] = value_states[prompts]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset: a prompt attends to itself."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens before the queries of a prompt: none."""
        return 0

    def get_max_length(self) -> int:
        """Return that it grows as needed."""
        return -1

    def views(self, rows: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some rows and the first columns."""
        return self._kept_keys[rows, :, :columns], self._kept_values[rows, :, :columns]

    def grow(self) -> None:
        """Take the cache's capacity, keeping what is there."""
        if self.is_initialized:
            self._kept_keys = _copied_into(self._kept_keys, self._sized(self._kept_keys))
            self._kept_values = _copied_into(self._kept_values, self._sized(self._kept_values))

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy rows onto others, the first `length` columns."""
        self._kept_keys[targets, :, :length] = self._kept_keys[sources, :, :length]
        self._kept_values[targets, :, :length] = self._kept_values[sources, :, :length]

    def _sized(self, like: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        return like.new_zeros((cache.row_capacity, like.shape[1], cache.capacity, like.shape[3]))


class SlotCache(Cache):
    """A cache that any attention model of transformers can write prompts to.

    Attributes:
        row_capacity: Slots.
        capacity: Columns: tokens per slot.
        first_row: Where the rows of a prompt pass go.
        prompts: i64[n], which prompt of the pass each of these n rows begins with.
    """

    def __init__(self, *, layer_count: int, row_limit: int, limit: int) -> None:
        self.row_capacity = min(16, row_limit)
        self.capacity = min(64, limit)
        self.first_row = 0
        self.prompts = torch.empty(0, dtype=torch.long)
        self._row_limit = row_limit
        self._limit = limit
        self._layers = [SlotLayer(self) for _ in range(layer_count)]
        super().__init__(layers=list(self._layers))

    def expect_prompts(self, prompts: torch.Tensor, *, first_row: int, length: int) -> None:
        """Let the next pass write prompts of `length` to fresh rows.

        Args:
            prompts: i64[n], which prompt of the pass each of n rows begins with.
            first_row: Where these rows are.
            length: Padded.
        """
        self._reserve(first_row + len(prompts), length)
        self.first_row = first_row
        self.prompts = prompts

    def states(self, rows: slice, *, length: int) -> list[torch.Tensor]:
        """Return keys, then values, of each layer in turn, [rows, heads, length, head size].

        They are views: what a pass writes to them is kept.
        """
        self._reserve(rows.stop, length)
        return [state for layer in self._layers for state in layer.views(rows, length)]

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy rows onto others, the first `length` columns of every layer."""
        for layer in self._layers:
            layer.move(sources, targets, length)

    def _reserve(self, rows: int, columns: int) -> None:
        if rows <= self.row_capacity and columns <= self.capacity:
            return
        self.row_capacity = grown(self.row_capacity, needed=rows, limit=self._row_limit)
        self.capacity = grown(self.capacity, needed=columns, limit=self._limit)
        for layer in self._layers:
            layer.grow()


def _copied_into(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows, _, columns, _ = source.shape
    target[:rows, :, :columns] = source
    return target


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The tokens of a row that ended, and what was computed of them.

    Attributes:
        length: Tokens.
        states: Keys, then values, of each layer in turn, [heads, length, head size].
    """

    length: int
    states: Sequence[torch.Tensor]


class PrefixCache:
    """The newest beginnings, up to a number of tokens together.

    A prompt goes on from one if it begins with all of its tokens, which are a prompt and what was
    sampled after it. So what a request gets does not depend on requests that it does not quote.
    """

    def __init__(self, *, token_limit: int) -> None:
        self._token_limit = token_limit
        self._token_count = 0
        # By policy and tokens, the oldest first.
        self._kept: dict[tuple[int, bytes], Beginning] = {}
        self._lengths: Counter[int] = Counter()

    def keep(self, adapter: int, tokens: np.ndarray, states: Sequence[torch.Tensor]) -> None:
        """Take what was computed of a row of a policy, i32[n]; the oldest make room for it."""
        self._forget((adapter, tokens.tobytes()))
        self._kept[adapter, tokens.tobytes()] = Beginning(len(tokens), states)
        self._lengths[len(tokens)] += 1
        self._token_count += len(tokens)
        while self._token_count > self._token_limit:
            self._forget(next(iter(self._kept)))

    def take(self, adapter: int, prompt: np.ndarray) -> Beginning | None:
        """Return the longest beginning of a prompt, i32[n], which is forgotten; None: none is."""
        for length in sorted((n for n in self._lengths if n < len(prompt)), reverse=True):
            found = self._forget((adapter, prompt[:length].tobytes()))
            if found is not None:
                return found
        return None

    def drop(self, adapter: int) -> None:
        """Forget those of a policy: other weights would compute something else."""
        for key in [key for key in self._kept if key[0] == adapter]:
            self._forget(key)

    def _forget(self, key: tuple[int, bytes]) -> Beginning | None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._token_count -= found.length
            self._lengths -= Counter([found.length])
        return found
