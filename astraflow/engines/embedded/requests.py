"""Requests: one generation each, from the call to its result."""

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation, Watch


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation; it belongs to the engine's thread once it was handed over.

    Attributes:
        prompt: i32[n], n at least 1.
        sampling: Checked.
        stream: Of its random numbers.
        budget: Tokens that it may sample.
        version: Pins it; None: the live one.
        reply: Resolved on the event loop.
        kv: What becomes of its cache when another version takes over.
        watch: Told what is sampled; None: nobody is.
        shown_count: Tokens that it was told of.
        takeovers: (tokens sampled before, version) of each version that sampled for it.
    """

    prompt: np.ndarray
    sampling: SamplingParams
    stream: np.uint64
    budget: int
    version: int | None
    reply: asyncio.Future[Generation]
    kv: KvPolicy = KvPolicy.KEEP
    watch: Watch | None = None
    shown_count: int = 0
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


def check_sampling(sampling: SamplingParams, *, vocab_size: int, reads_text: bool) -> None:
    """Reject what the engine cannot honour.

    Raises:
        AstraflowError: INVALID_FIELD naming the knob.
    """
    claims = {
        "temperature": sampling.temperature >= 0 and math.isfinite(sampling.temperature),
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k is None or sampling.top_k >= 1,
        "min_p": 0 <= sampling.min_p < 1,
        "max_new_tokens": sampling.max_new_tokens >= 0,
        "min_new_tokens": sampling.min_new_tokens >= 0,
        "stop_token_ids": all(0 <= token < vocab_size for token in sampling.stop_token_ids),
        "stop_strings": all(sampling.stop_strings) and (reads_text or not sampling.stop_strings),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
    }
    for name, is_sound in claims.items():
        if not is_sound:
            hint = "; the model has no tokenizer.json" if name == "stop_strings" else ""
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"sampling.{name} = {getattr(sampling, name)!r} cannot be honoured{hint}",
                metadata={"field": f"sampling.{name}"},
            )


def check_prompt(prompt: np.ndarray, *, vocab_size: int, max_context: int) -> None:
    """Reject a prompt that cannot be sampled from.

    Args:
        prompt: i64[n].
        vocab_size: Ids that the model knows.
        max_context: Tokens of prompt and completion together.

    Raises:
        AstraflowError: INVALID_FIELD for an empty one or ids that the model does not have,
            CONTEXT_TOO_LONG when no token would fit behind it.
    """
    if not len(prompt) or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"a prompt has at least one token, each from 0 to {vocab_size - 1}",
            metadata={"field": "prompt"},
        )
    if len(prompt) >= max_context:
        raise AstraflowError(
            Reason.CONTEXT_TOO_LONG,
            f"the prompt has {len(prompt)} tokens and the context {max_context}, which leaves no "
            "room for a completion; shorten the prompt or raise engine.max_context",
            metadata={"prompt_tokens": str(len(prompt)), "max_context": str(max_context)},
        )
