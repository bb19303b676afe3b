"""Sessions: one episode as an agent sees it, what it samples there, and how it is let in."""

import asyncio
import json
import secrets
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import Trajectory
from astraflow.core.texts import whole_text
from astraflow.engines.protocol import Watch
from astraflow.workflows.agents.prompts import Chats, Texts
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.protocol import Score
from astraflow.workflows.turns import (
    Turn,
    TurnTree,
    mixed_seed,
    trajectories_of,
    trajectory_seed,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Capture:
    """Samples from a policy and keeps every turn.

    Attributes:
        port: The policy.
        chats: Makes prompts of messages.
        texts: Makes prompts of texts.
    """

    def __init__(self, port: PolicyPort, *, prefix: str) -> None:
        """Start without a turn; `prefix` begins the ids of its trajectories."""
        self.port = port
        self.chats = Chats(port.template, port.tokenizer)
        self.texts = Texts(port.tokenizer)
        self._tree = TurnTree()
        self._prefix = f"{prefix}/{port.policy_id}"

    @property
    def turns(self) -> Sequence[Turn]:
        """In the order in which they ended."""
        return self._tree.turns

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        overrides: dict[str, Any],
        seed: int | None = None,
        watch: Watch | None = None,
    ) -> Turn:
        """Sample one completion.

        Args:
            prompt: Token ids.
            overrides: Fields of SamplingParams that differ from the task's.
            seed: Of the agent's choice; mixed with the sample's own, so that the rollouts of a
                group differ.
            watch: Told what was sampled while it goes on.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG, and what the engine raises.
        """
        port = self.port
        wanted = replace(port.sampling, **overrides)
        opening = self._tree.open(prompt, temperature=wanted.temperature)
        own_seed = trajectory_seed(port.sampling.seed, opening.branch)
        chosen = own_seed if seed is None else mixed_seed(own_seed, seed)
        generation, sampling = await port.generate(
            prompt, replace(wanted, seed=chosen), watch=watch
        )
        if not port.is_trained:  # no trainer scores it, so all of it counts
            generation = replace(generation, constrained=None)
        sampling = replace(sampling, grammar=None, top_logprobs=0)
        return self._tree.add(opening, generation, sampling)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield one per branch in which anything can be trained on."""
        policy_id, engine = self.port.policy_id, self.port.engine.name
        made = list(trajectories_of(self._tree, policy_id, engine=engine, prefix=self._prefix))
        if self.turns and not made:
            log.warning(
                "nothing of an episode can be trained on: grammars (response_format, tool_choice) "
                "changed every draw; ask for them in fewer turns, or in the prompt",
                policy=policy_id,
            )
        return iter(made)


# Not the policy's doing, nor the agent's: a rollout in which these stay unmended is not trained on.
_INFRASTRUCTURE = frozenset(
    {Reason.ENGINE_FAILED, Reason.VERSION_NOT_SERVED, Reason.INTERNAL, Reason.OVERLOADED}
)


class AgentSession:
    """What an agent may do in one episode.

    Attributes:
        session_id: Nobody can guess it.
        key: Nor this; an API key.
        episode: What it works on.
        chooses_sampling: Whether temperature, truncation and penalties are the agent's to choose.
        score: As reported; None: not yet.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        models: Mapping[str, str] | None = None,
        chooses_sampling: bool = False,
    ) -> None:
        """Begin; what is sampled is the episode's.

        Args:
            episode: What it works on.
            models: Policy by the model name that the agent asks for; other names than these and
                the policies' own mean the first policy.
            chooses_sampling: Whether temperature and the like are the agent's, not the recipe's.

        Raises:
            AstraflowError: POLICY_UNKNOWN when a model is to be a policy that there is not.
        """
        self.session_id = secrets.token_hex(16)
        self.key = f"sk-{secrets.token_hex(24)}"
        self.episode = episode
        self.chooses_sampling = chooses_sampling
        self.score: Score | None = None
        self._models = models or {}
        for policy_id in self._models.values():
            episode.port(policy_id)
        self._captures = {
            policy_id: Capture(episode.port(policy_id), prefix=episode.rollout_id)
            for policy_id in episode.policy_ids
        }
        self._too_long: dict[PolicyId, AstraflowError] = {}
        self._unmended: dict[tuple[PolicyId, tuple[int, ...]], AstraflowError] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        episode.attach(self)

    @property
    def has_sampled(self) -> bool:
        """Whether any token was sampled yet."""
        return any(capture.turns for capture in self._captures.values())

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._ended.done()

    @property
    def is_cut(self) -> bool:
        """Whether a token budget ended the last thing that any policy said."""
        last = (capture.turns[-1] for capture in self._captures.values() if capture.turns)
        return any(turn.is_cut for turn in last)

    @property
    def last_text(self) -> str:
        """What the first policy that said anything said last; special tokens left out.

        Of an answer that was cut and gone on with, all of it.
        """
        for capture in self._captures.values():
            if capture.turns:
                turn = capture.turns[-1]
                tokens = turn.generation.tokens.tolist()
                while turn.parent is not None and turn.parent.is_cut and not len(turn.seen):
                    turn = turn.parent
                    tokens = [*turn.generation.tokens.tolist(), *tokens]
                return capture.port.tokenizer.decode(tokens)
        return ""

    @property
    def policy_ids(self) -> tuple[PolicyId, ...]:
        """That it may ask for, the default first."""
        return tuple(self._captures)

    def capture_of(self, model: str) -> Capture:
        """Return what samples for a model name.

        Raises:
            AstraflowError: POLICY_UNKNOWN when there are several policies and none of that name.
        """
        name = PolicyId(self._models.get(model, model))
        if name in self._captures:
            return self._captures[name]
        if len(self._captures) > 1 and "*" not in self._models:
            raise AstraflowError(
                Reason.POLICY_UNKNOWN,
                f"the model '{model}' does not exist; there are {', '.join(self._captures)}. "
                "Ask for one of them, or map the name in the workflow's options (models)",
                metadata={"field": "model"},
            )
        default = PolicyId(self._models.get("*", next(iter(self._captures))))
        return self._captures[default]

    def require_context(self, capture: Capture, token_count: int) -> None:
        """Refuse a prompt of so many tokens that leaves no room for an answer.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG.
        """
        limit = capture.port.engine.max_context_token_count
        if token_count < limit:
            return
        # Agents know it by these words alone, and shorten the chat then: Claude Code by the first,
        # those on litellm by either.
        too_long = AstraflowError(
            Reason.CONTEXT_TOO_LONG,
            f"prompt is too long: {token_count} tokens > {limit - 1} maximum. This model's maximum "
            f"context length is {limit} tokens: shorten the messages, leave out long prompts "
            "(data.*.max_prompt_chars) or raise raas.engine.max_context",
        )
        self._too_long[capture.port.policy_id] = too_long
        raise too_long

    async def sample(
        self,
        capture: Capture,
        prompt: list[int],
        *,
        overrides: dict[str, Any],
        seed: int | None = None,
        watch: Watch | None = None,
    ) -> Turn:
        """Sample one completion; it is withdrawn when the session ends.

        Raises:
            AstraflowError: As `Capture.sample`; TASK_CANCELLED when the session ended; INTERNAL
                when what the engine raised is none.
        """
        try:
            turn = await self._while_open(
                capture.sample(prompt, overrides=overrides, seed=seed, watch=watch)
            )
        except AstraflowError as error:
            self.note_failure(capture, prompt, error)
            raise
        except Exception as error:
            log.exception("an engine broke", policy=capture.port.policy_id)
            # No agent is told a text of the server's.
            why = f"the node broke: {type(error).__name__}"
            broke = AstraflowError(Reason.INTERNAL, why, retryable=True)
            self.note_failure(capture, prompt, broke)
            raise broke from error
        self._unmended.pop((capture.port.policy_id, tuple(prompt)), None)
        # Its agent has made room.
        self._too_long.pop(capture.port.policy_id, None)
        return turn

    def note_failure(self, capture: Capture, prompt: Sequence[int], error: AstraflowError) -> None:
        """Note that a prompt was not answered; it is looked at unless it is answered later on."""
        if error.reason in _INFRASTRUCTURE:
            self._unmended[capture.port.policy_id, tuple(prompt)] = error

    def report(self, score: Score) -> None:
        """Take the reward that the agent reports; a later one replaces it."""
        self.score = score

    def end(self, failure: str = "") -> None:
        """End the episode; idempotent. A failure says why the agent could not do its work."""
        if not self._ended.done():
            self._ended.set_result(failure)
        for task in self._running:
            task.cancel()

    async def ended(self) -> str:
        """Wait until it ends; return the failure, empty: there is none."""
        return await asyncio.shield(self._ended)

    def cause_of(self, failure: AstraflowError) -> AstraflowError:
        """Return why an agent failed: that a context is full, as it was told last; or as given."""
        return next(iter(self._too_long.values()), failure)

    def raise_infrastructure(self) -> None:
        """Raise what went wrong in an engine, unless the same request went well later on.

        Raises:
            AstraflowError: The first such failure.
        """
        for error in self._unmended.values():
            raise error

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield what was sampled, policy by policy."""
        for capture in self._captures.values():
            yield from capture.trajectories()

    async def _while_open(self, work: Coroutine[Any, Any, Turn]) -> Turn:
        if not self.is_open:
            work.close()
            raise _over()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            itself = asyncio.current_task()
            if not self.is_open and not (itself and itself.cancelling()):
                raise _over() from None
            task.cancel()
            raise


def describe(session: AgentSession) -> dict[str, Any]:
    """Return what an agent is told of its episode, in what any reader of JSON takes.

    A number that is none, as a column with holes has it, is null.
    """
    task = session.episode.task
    said = {
        "session_id": session.session_id,
        "api_key": session.key,
        "workflow": task.workflow_id,
        "purpose": task.purpose,
        "group_id": task.group_id,
        "sample_index": session.episode.sample_index,
        "prompt_id": task.prompt.prompt_id,
        "task": dict(task.prompt.fields),
        "models": list(session.policy_ids),
    }
    text = whole_text(json.dumps(said, ensure_ascii=False))
    return json.loads(text, parse_constant=lambda _: None)


def _over() -> AstraflowError:
    return AstraflowError(
        Reason.TASK_CANCELLED, "the session is over; the episode was ended or took too long"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEndpoint:
    """Where an agent finds its episode.

    Attributes:
        base_url: For clients of OpenAI's API; of this episode alone.
        session_url: Where its reward is reported and its end.
        key: For clients that tell episodes by their API key.
    """

    base_url: str
    session_url: str
    key: str


class AgentServer(Protocol):
    """Lets agents in."""

    def open(self, session: AgentSession) -> AbstractAsyncContextManager[SessionEndpoint]:
        """Serve a session until the end of the context."""
        ...

    async def queue(self, lane: str) -> tuple[str, str]:
        """Return where the sessions of a lane are handed out: a URL to POST to, a bearer token."""
        ...

    def offer(self, session: AgentSession, lane: str) -> None:
        """Hand an open session to the next agent that asks for one."""
        ...
