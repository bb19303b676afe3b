"""Ports: how an episode reaches its policies, and what comes of that."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import FinishReason
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Engine, Generation, Watch
from astraflow.telemetry.traces import span
from astraflow.workflows.agents.template import ChatTemplate


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """Return the ids of a text; True adds what the model wants around it, as its start."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyPort:
    """How an episode reaches one policy.

    Attributes:
        policy_id: Which.
        engine: Samples.
        tokenizer: Of its model.
        sampling: Defaults; the seed is that of the sample.
        version: Pins every token to it; None: whatever is live.
        template: Of its chats.
        is_trained: Whether what it samples is for its trainer.
        meter: Is entered for each request to the engine; several may be within it at once.
        end_id: Token that ends an answer; None: not known.
    """

    policy_id: PolicyId
    engine: Engine
    tokenizer: Tokenizer
    sampling: SamplingParams
    version: int | None = None
    template: ChatTemplate = field(default_factory=ChatTemplate)
    is_trained: bool = False
    meter: AbstractContextManager[None] = field(default_factory=nullcontext)
    end_id: int | None = None

    def fit(
        self, sampling: SamplingParams, token_count: int, *, before: SamplingParams | None = None
    ) -> SamplingParams:
        """Return the sampling with a budget that the context has room for after so many tokens.

        Args:
            sampling: That is wished for.
            token_count: Tokens of the trajectory so far.
            before: Of what was sampled in the trajectory so far; None: nothing was.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when there is no room for another token; INVALID_FIELD
                for a sampling that a trainer cannot score, see `SamplingParams.reshaped_by`.
        """
        if self.is_trained:
            if sampling.is_reshaped:
                sampling.require_trainable()
            if before is not None and before.temperature != sampling.temperature:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"temperature = {sampling.temperature} after {before.temperature} in one "
                    "trajectory, which a trainer scores under one; begin another trajectory",
                    metadata={"field": "sampling.temperature"},
                )
        limit = self.engine.max_context_token_count
        room = limit - token_count
        if room < 1:
            raise AstraflowError(
                Reason.CONTEXT_TOO_LONG,
                f"a trajectory has {token_count} tokens, and the context of {self.policy_id} is "
                f"{limit}: leave out long prompts (data.*.max_prompt_chars) or raise "
                "raas.engine.max_context",
            )
        if sampling.max_new_tokens <= room:
            return sampling
        return replace(sampling, max_new_tokens=room)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        before: SamplingParams | None = None,
        watch: Watch | None = None,
    ) -> tuple[Generation, SamplingParams]:
        """Sample what comes after a prompt, within what the context has room for.

        Returns:
            What was sampled, and the sampling as used.

        Raises:
            AstraflowError: As `fit`, and what the engine raises.
        """
        used = self.fit(sampling, len(prompt), before=before)
        traced = span("gen_ai.generate", prompt_token_count=len(prompt), policy=self.policy_id)
        with traced, self.meter:
            generation = await self.engine.generate(prompt, used, version=self.version, watch=watch)
        return generation, used


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """What one generation said.

    Attributes:
        text: Special tokens left out.
        tokens: i32[n], a sampled end token included.
        logprobs: f32[n], under the distribution sampled from.
        finish_reason: STOP at an end token or stop string, LENGTH at a budget.
    """

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason

    @property
    def is_cut(self) -> bool:
        """Whether a token budget ended it."""
        return self.finish_reason is FinishReason.LENGTH
