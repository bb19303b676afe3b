"""What a user writes, a workflow or a scorer, and what these are given.

Example: a whole workflow.

    @workflow("polite")
    class Polite:
        class Options(Strict):
            greeting: str = "Please: "

        def __init__(self, options: Options, scorer: Scorer | None) -> None:
            self._greeting, self._scorer = options.greeting, needs_scorer(scorer)

        async def run(self, episode: Episode) -> Score:
            talk = episode.trajectory()
            talk.observe(self._greeting + episode.prompt.fields["prompt"])
            reply = await talk.sample()
            return await self._scorer.score(episode.prompt, reply.text)

What the policy did badly is a low reward. What an engine or an environment did badly is an
`AstraflowError`: the sample is run again or given up, never trained on.
"""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import FinishReason, Trajectory
from astraflow.core.tasks import Prompt, SamplingParams
from astraflow.engines.protocol import Engine
from astraflow.workflows.agents.template import ChatTemplate

if TYPE_CHECKING:
    from astraflow.workflows.episode import Episode


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """Return the ids of a text; special tokens that it spells out become themselves.

        Args:
            text: Any.
            add_special_tokens: Add what the model wants around a text, such as its start.
        """
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
    """

    policy_id: PolicyId
    engine: Engine
    tokenizer: Tokenizer
    sampling: SamplingParams
    version: int | None = None
    template: ChatTemplate = field(default_factory=ChatTemplate)

    def fit(self, sampling: SamplingParams, token_count: int) -> SamplingParams:
        """Return the sampling with a budget that the context has room for after so many tokens.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when there is no room for another token.
        """
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


class Recorded(Protocol):
    """What records trajectories beside the recorders of an episode."""

    @property
    def has_sampled(self) -> bool:
        """Whether any token was sampled yet."""
        ...

    def trajectories(self) -> Iterable[Trajectory]:
        """Return what was sampled, parents before children."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an answer, or a whole episode, is worth.

    Attributes:
        reward: What is trained on.
        parts: What the reward is made of, or what kind of answer it was, by name.
        metrics: Numbers for the log; means over rollouts are shown.
        truncated: A token or turn budget ended the episode.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    truncated: bool = False


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


class Scorer(Protocol):
    """Says what an answer to a prompt is worth: a function, or an object made from options.

    A scorer that takes more than a millisecond is `async` and leaves the event loop free.
    An exception is a failure of the scorer, never a reward of 0.
    """

    def __call__(self, prompt: Prompt, text: str, /) -> "Score | float | Awaitable[Score | float]":
        """Return what `text` is worth as an answer to `prompt`."""
        ...


class Workflow(Protocol):
    """Turns a prompt into a rollout; one object runs many episodes at a time."""

    async def run(self, episode: "Episode", /) -> Score | float:
        """Run one episode; the tokens that its trajectories hold are trained on.

        Raises:
            AstraflowError: What is not the policy's fault, such as ENVIRONMENT_FAILED.
        """
        ...
