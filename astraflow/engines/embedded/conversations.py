"""Conversations: what the cache had of rows that ended, for prompts that go on from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The tokens of a row that ended, and what was computed of them.

    Attributes:
        length: Tokens.
        states: Keys, then values, of each layer in turn, [heads, length, head size].
    """

    length: int
    states: Sequence[torch.Tensor]


class Conversations:
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
