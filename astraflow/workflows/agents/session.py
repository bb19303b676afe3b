"""Sessions: one episode as an agent sees it, from its first request to its reward."""

import asyncio
import secrets
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import FinishReason, Trajectory
from astraflow.engines.protocol import Watch
from astraflow.workflows.agents.capture import Capture
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score
from astraflow.workflows.turns import Turn

T = TypeVar("T")

# Not the policy's doing, nor the agent's: a rollout in which these stay unmended is not trained on.
_INFRASTRUCTURE = frozenset(
    {Reason.ENGINE_FAILED, Reason.VERSION_NOT_SERVED, Reason.INTERNAL, Reason.OVERLOADED}
)


class SamplingSource(StrEnum):
    """Who chooses temperature, truncation and penalties."""

    RECIPE = "recipe"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an agent ended its episode.

    Attributes:
        failure: Why it could not do its work; empty: it did.
    """

    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """How an agent may sample.

    Attributes:
        models: Policy by the model name that the agent asks for; other names than these and the
            policies' own mean the first policy.
        sampling: Who chooses the knobs.
    """

    models: Mapping[str, str] = field(default_factory=dict[str, str])
    sampling: SamplingSource = SamplingSource.RECIPE


class AgentSession:
    """What an agent may do in one episode.

    Attributes:
        session_id: Nobody can guess it.
        key: Nor this; an API key.
        episode: What it works on.
        rules: How it may sample.
        score: As reported; None: not yet.
    """

    def __init__(self, episode: Episode, rules: SessionRules | None = None) -> None:
        """Begin; what is sampled is the episode's."""
        self.session_id = secrets.token_hex(16)
        self.key = f"sk-{secrets.token_hex(24)}"
        self.episode = episode
        self.rules = rules or SessionRules()
        self.score: Score | None = None
        self._captures = {
            policy_id: Capture(episode.port(policy_id), prefix=episode.rollout_id)
            for policy_id in episode.policy_ids
        }
        self._too_long: AstraflowError | None = None
        self._unmended: dict[bytes, AstraflowError] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
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
        return any(turn.generation.finish_reason is FinishReason.LENGTH for turn in last)

    @property
    def last_text(self) -> str:
        """What the first policy that said anything said last; special tokens left out."""
        for capture in self._captures.values():
            if capture.turns:
                tokens = capture.turns[-1].generation.tokens.tolist()
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
        name = PolicyId(self.rules.models.get(model, model))
        if name in self._captures:
            return self._captures[name]
        if len(self._captures) > 1 and self.rules.models.get("*") is None:
            raise AstraflowError(
                Reason.POLICY_UNKNOWN,
                f"the model '{model}' does not exist; there are {', '.join(self._captures)}. "
                "Ask for one of them, or map the name in the workflow's options (models)",
                metadata={"field": "model"},
            )
        default = PolicyId(self.rules.models.get("*", next(iter(self._captures))))
        return self._captures[default]

    def require_room(self, capture: Capture, token_count: int) -> None:
        """Refuse a prompt of so many tokens that leaves no room for an answer.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG.
        """
        try:
            capture.port.fit(capture.port.sampling, token_count)
        except AstraflowError as error:
            self._too_long = error
            raise

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
            AstraflowError: As `Capture.sample`; TASK_CANCELLED when the session ended.
        """
        mark = repr((capture.port.policy_id, prompt)).encode()
        try:
            turn = await self._while_open(
                capture.sample(prompt, overrides=overrides, seed=seed, watch=watch)
            )
        except AstraflowError as error:
            if error.reason in _INFRASTRUCTURE:
                self._unmended[mark] = error
            raise
        self._unmended.pop(mark, None)
        return turn

    def report(self, score: Score) -> None:
        """Take the reward that the agent reports; a later one replaces it."""
        self.score = score

    def end(self, ending: Ending | None = None) -> None:
        """End the episode; idempotent."""
        if not self._ended.done():
            self._ended.set_result(ending or Ending())
        for task in self._running:
            task.cancel()

    async def ended(self) -> Ending:
        """Wait until it ends."""
        return await asyncio.shield(self._ended)

    def cause_of(self, failure: AstraflowError) -> AstraflowError:
        """Return why an agent failed: that the context was full, if it was told so; or as given."""
        return self._too_long or failure

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

    async def _while_open(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.is_open:
            work.close()
            raise _over()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.is_open and not _is_cancelled_itself():
                raise _over() from None
            task.cancel()
            raise


def describe(session: AgentSession) -> dict[str, Any]:
    """Return what an agent is told of its episode."""
    task = session.episode.task
    return {
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


def _is_cancelled_itself() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _over() -> AstraflowError:
    return AstraflowError(
        Reason.TASK_CANCELLED, "the session is over; the episode was ended or took too long"
    )
