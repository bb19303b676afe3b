"""What a RaaS needs of an inference engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate

UNCHANGED = 1e-3
"""Probability that a grammar may take away from a draw that counts as the policy's own.

Its log-probability is that much off at most, less than engines and trainers differ in bf16.
"""

Likeliest = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, the likeliest first."""

Watch = Callable[[np.ndarray], None]
"""Told of the tokens, i32[n], that were sampled since the last call; on the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What one call of `Engine.generate` sampled.

    Attributes:
        tokens: i32[n], n may be 0; an end token that was sampled is the last one.
        logprobs: f32[n], log-probability of each token under the distribution that it was
            sampled from (after penalties, temperature, grammar and truncation).
        version_spans: Cover the n tokens in order.
        finish_reason: STOP at an end token or stop string, LENGTH at a budget.
        routed_experts: u16[prompt + n, layers, k], which experts each token went through, see
            `core.rollouts`; None: the model has none, or the engine does not tell.
        constrained: bool[n], true on tokens whose draw a grammar changed: it took away more than
            `UNCHANGED` of the probability. True on all where the engine cannot tell; None: there
            was no grammar.
        likeliest: Of the softmax that each of the n tokens was sampled from, as many as
            `sampling.top_logprobs` asks for; empty: none were asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    constrained: np.ndarray | None = None
    likeliest: Sequence[Likeliest] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running_count: Sequences being decoded.
        queued_count: Requests that wait for a place.
        sampled_token_count: Tokens sampled since the start.
        kv_fraction: Used share of the KV cache, 0 to 1.
        busy_s: Seconds spent computing since the start.
    """

    running_count: int = 0
    queued_count: int = 0
    sampled_token_count: int = 0
    kv_fraction: float = 0.0
    busy_s: float = 0.0


class Engine(Protocol):
    """Generates tokens of one policy, and changes its weights while it does.

    All methods belong to one event loop. An engine starts without weights of the run;
    the first `swap` brings them.
    """

    @property
    def name(self) -> str:
        """Name and release, such as `embedded/0.1.0`."""
        ...

    @property
    def version(self) -> int | None:
        """What newly sampled tokens are of; None before the first swap."""
        ...

    @property
    def pinned_versions(self) -> frozenset[int]:
        """Older versions that `generate` can still be asked for."""
        ...

    @property
    def keeps_versions(self) -> bool:
        """Whether a pinned version serves on beside newer ones; if not, no newer one goes live."""
        ...

    @property
    def max_context_token_count(self) -> int:
        """Prompt and completion together."""
        ...

    @property
    def tells_experts(self) -> bool:
        """Whether generations have `routed_experts`: whether its model has routers."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion.

        Cancelling the awaiting task withdraws the request and frees its place.

        Args:
            prompt: Token ids, at least one.
            sampling: The knobs. With a seed the draw for each token depends only on
                (seed, position in the sequence), not on what else runs.
            version: Pins every token to this version; None: the live one, which may
                change between two tokens.
            watch: Told what is sampled while it goes on, where the engine can; what it was not
                told of is in the generation, which is whole.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG, VERSION_NOT_SERVED, ENGINE_FAILED,
                INVALID_FIELD for sampling parameters that it cannot honour.
        """
        ...

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live between two decode steps; running generations go on.

        An engine that does not keep versions waits until none is pinned.

        The work that does not need the pause (conversion, copies to the device) is done
        beside generation.

        Raises:
            AstraflowError: APPLY_FAILED; the old version serves on.
        """
        ...

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Say where all weights are had, should the engine ever lose its own."""
        ...

    async def pin(self, version: int) -> None:
        """Keep the live version, which must be `version`, for `generate(version=...)`.

        Counted: as many calls of `unpin` let it go.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is not live or pinned.
        """
        ...

    async def unpin(self, version: int) -> None:
        """Let a pinned version go once its running generations are done."""
        ...

    def load(self) -> EngineLoad:
        """Return how busy it is now.

        Raises:
            AstraflowError: ENGINE_FAILED: it broke for good, and its node is to end; or was closed.
        """
        ...

    async def close(self) -> None:
        """Stop; running generations end with ENGINE_FAILED."""
        ...
