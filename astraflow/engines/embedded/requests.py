"""Requests: one generation each, from the call to its result."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import KvPolicy, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.grammars import Guide
from astraflow.engines.protocol import Generation, Likeliest, Watch


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation; it belongs to the engine's thread once it was handed over.

    Attributes:
        prompt: i32[n], n at least 1.
        sampling: Checked.
        stream: Of its random numbers.
        budget: Tokens that it may sample.
        version: Pins it; None: the live one.
        adapter: Of which policy, of those that share a base.
        reply: Resolved on the event loop.
        kv: What becomes of its cache when another version takes over.
        watch: Told what is sampled; None: nobody is.
        shown_count: Tokens that it was told of.
        guide: Follows its grammar; None: it has none.
        likeliest: Beside each token that it sampled, where that was asked for.
        takeovers: (tokens sampled before, version) of each version that sampled for it.
    """

    prompt: np.ndarray
    sampling: SamplingParams
    stream: np.uint64
    budget: int
    version: int | None
    reply: asyncio.Future[Generation]
    adapter: int = 0
    kv: KvPolicy = KvPolicy.KEEP
    watch: Watch | None = None
    shown_count: int = 0
    guide: Guide | None = None
    likeliest: list[Likeliest] = field(default_factory=list[Likeliest])
    takeovers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take_over(self, version: int, *, sampled_count: int) -> None:
        """Note that tokens from now on are of `version`."""
        if self.takeovers and self.takeovers[-1][0] == sampled_count:
            self.takeovers.pop()
        if not self.takeovers or self.takeovers[-1][1] != version:
            self.takeovers.append((sampled_count, version))

    def spans(self, sampled_count: int) -> tuple[VersionSpan, ...]:
        """Return which version sampled how many tokens."""
        starts = [*self.takeovers, (sampled_count, -1)]
        return tuple(
            VersionSpan(
                version=version,
                length=starts[i + 1][0] - start,
                kv=self.kv if start else KvPolicy.UNKNOWN,
            )
            for i, (start, version) in enumerate(self.takeovers)
            if starts[i + 1][0] > start
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that left the engine, and what came of it."""

    request: Request
    result: Generation | AstraflowError
