"""The KV cache: a slot per row, rows close together, ragged lengths; and kept prefixes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from astraflow.engines.embedded.shapes import grown


class PassLayer(CacheLayerMixin):
    """What a pass has for the cache of one layer: its new keys and values are written elsewhere."""

    def __init__(self, write: Callable[..., Sequence[Tensor]], keys: Tensor | None = None) -> None:
        """Write nothing yet.

        Args:
            write: Takes new keys and values, [rows, heads, n, head size]; returns what is
                attended to.
            keys: That are attended to, [rows, heads, length, head size]; None: the new ones alone.
        """
        cast("Any", super()).__init__()
        self._write = write
        self._keys = keys
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Have the new states written; return all that is attended to."""
        keys, values = self._write(key_states, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length if self._keys is None else self._keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return nothing that is read: positions and masks are given."""
        return 0

    def get_max_length(self) -> int:
        """Return that there is no limit of its own."""
        return -1

    # Its name in earlier releases of transformers.
    get_max_cache_shape = get_max_length


class SlotCache:
    """Keys and values of all layers, [slots, heads, columns, head size]; it grows as needed.

    A pass over prompts of any attention model of transformers writes to it; later ones get views.
    """

    def __init__(self, *, layer_count: int, row_limit: int, limit: int) -> None:
        self._row_capacity = min(16, row_limit)
        self._capacity = min(64, limit)
        self._row_limit = row_limit
        self._limit = limit
        # Of each layer; empty before the first prompt shows their shapes.
        self._layers: list[list[Tensor]] = [[] for _ in range(layer_count)]

    def for_prompts(self, prompts: Tensor, *, first_row: int, length: int) -> Cache:
        """Return the cache of a pass over prompts: each attends to itself, and goes to fresh rows.

        Args:
            prompts: i64[n], which prompt of the pass each of n rows begins with.
            first_row: Where these rows are.
            length: Padded.
        """
        rows = slice(first_row, first_row + len(prompts))
        self._reserve(rows.stop, length)
        writes = (partial(self._write, states, rows, prompts) for states in self._layers)
        return Cache(layers=[PassLayer(write) for write in writes])

    def states(self, rows: slice, *, length: int) -> list[Tensor]:
        """Return keys, then values, of each layer in turn, [rows, heads, length, head size].

        They are views: what a pass writes to them is kept.
        """
        self._reserve(rows.stop, length)
        return [state[rows, :, :length] for states in self._layers for state in states]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy rows onto others, the first `length` columns of every layer."""
        for states in self._layers:
            for state in states:
                state[targets, :, :length] = state[sources, :, :length]

    def _write(
        self, states: list[Tensor], rows: slice, prompts: Tensor, *given: Tensor
    ) -> Sequence[Tensor]:
        if not states:
            states += map(self._sized, given)
        for state, new in zip(states, given, strict=True):
            state[rows, :, : new.shape[2]] = new[prompts]
        return given

    def _reserve(self, rows: int, columns: int) -> None:
        if rows <= self._row_capacity and columns <= self._capacity:
            return
        self._row_capacity = grown(self._row_capacity, needed=rows, limit=self._row_limit)
        self._capacity = grown(self._capacity, needed=columns, limit=self._limit)
        for states in self._layers:
            for index, old in enumerate(states):
                states[index] = self._sized(old)
                states[index][: old.shape[0], :, : old.shape[2]] = old

    def _sized(self, like: Tensor) -> Tensor:
        heads, size = like.shape[1], like.shape[3]
        return like.new_zeros((self._row_capacity, heads, self._capacity, size))


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The tokens of a row that ended, and what was computed of them.

    Attributes:
        states: Keys, then values, of each layer in turn, [heads, length, head size].
    """

    length: int
    states: Sequence[Tensor]


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

    def keep(self, adapter: int, tokens: np.ndarray, states: Sequence[Tensor]) -> None:
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
