"""Episodes: one run of a workflow, and the recorders that keep every token of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import (
    TURN_REWARDS,
    Column,
    ColumnAxis,
    FinishReason,
    Trajectory,
    VersionSpan,
)
from astraflow.core.tasks import RolloutTask, SamplingParams
from astraflow.engines.protocol import Generation
from astraflow.workflows.agents.messages import Message, normal_messages
from astraflow.workflows.agents.prompts import unended
from astraflow.workflows.ports import PolicyPort, Reply
from astraflow.workflows.turns import Turn, trajectory_of, trajectory_seed

if TYPE_CHECKING:
    from astraflow.workflows.agents.session import AgentServer, AgentSession


class Episode:
    """What a workflow is given for one rollout."""

    def __init__(
        self,
        *,
        task: RolloutTask,
        sample_index: int,
        policies: Mapping[PolicyId, PolicyPort],
        agent_server: "AgentServer | None" = None,
    ) -> None:
        """Start with no trajectory; `agent_server` lets in agents of other processes."""
        self.task = task
        self.sample_index = sample_index
        self.prompt = task.prompt
        """What to start from."""
        self.rollout_id = RolloutId(f"{task.task_id}/{sample_index}")
        """Unique for ever, because every attempt is a task of its own."""
        self._policies = policies
        self._door = agent_server
        self._recorders: list[Recorder] = []
        self._sessions: list[AgentSession] = []

    @property
    def policy_ids(self) -> tuple[PolicyId, ...]:
        """The policies that it may sample from, in the workflow's order."""
        return tuple(self._policies)

    def trajectory(
        self, policy_id: str | None = None, *, agent: str = "", after: "Recorder | None" = None
    ) -> "Recorder":
        """Start a trajectory.

        Each trajectory draws with a seed of its own, made from the sample's and from how
        many there were before, so start them in an order that does not depend on timing.

        Args:
            policy_id: Who samples, and trains on it; None: the first policy, or that of `after`.
            agent: What it is in the workflow. The rewards of a group are compared among the
                trajectories of one name: give the same to those that have the same task.
            after: Go on from all that this one holds, as a branch of it with a reward of its own;
                what was sampled there is trained on there.

        Raises:
            AstraflowError: POLICY_UNKNOWN when the workflow does not sample from it, or from
                another one than `after` did.
        """
        if after is not None and policy_id not in (None, after.policy_id):
            raise AstraflowError(
                Reason.POLICY_UNKNOWN,
                f"a trajectory of {after.policy_id} cannot go on with {policy_id}: their tokens "
                "differ; start another one",
            )
        policy_id = policy_id if after is None else after.policy_id
        index = len(self._recorders)
        port = self.port(policy_id)
        recorder = Recorder(
            trajectory_id=TrajectoryId(f"{self.rollout_id}/{index}"),
            port=port,
            agent=agent,
            seed=trajectory_seed(port.sampling.seed, index),
            past=None if after is None else after.past,
        )
        self._recorders.append(recorder)
        return recorder

    def port(self, policy_id: str | None = None) -> PolicyPort:
        """Return how a policy is reached; None: the first one.

        Raises:
            AstraflowError: POLICY_UNKNOWN when the workflow does not sample from it.
        """
        if policy_id is None:
            return next(iter(self._policies.values()))
        port = self._policies.get(PolicyId(policy_id))
        if port is None:
            raise AstraflowError(
                Reason.POLICY_UNKNOWN,
                f"workflow {self.task.workflow_id} has no policy {policy_id}, only "
                f"{', '.join(self._policies)}; name it under the workflow's policies",
            )
        return port

    @property
    def agent_server(self) -> "AgentServer":
        """What lets agents in.

        Raises:
            AstraflowError: CAPABILITY_MISSING when nothing does.
        """
        if self._door is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING, "agents are let in by rollout nodes alone; run it on one"
            )
        return self._door

    def attach(self, session: "AgentSession") -> None:
        """Train on what an agent samples in a session, too."""
        self._sessions.append(session)

    @property
    def has_sampled(self) -> bool:
        """Whether any token was sampled yet."""
        return any(recorder.sampled_count for recorder in self._recorders) or any(
            session.has_sampled for session in self._sessions
        )

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return what was recorded; a trajectory in which nothing was sampled is left out."""
        started: dict[PolicyId, int] = {}
        made: list[Trajectory] = []
        for recorder in self._recorders:
            if recorder.sampled_count:
                segment = started.get(recorder.policy_id, 0)
                started[recorder.policy_id] = segment + 1
                made.append(recorder.to_trajectory(segment_index=segment))
        attached = (each for session in self._sessions for each in session.trajectories())
        return (*made, *attached)


@dataclass(slots=True, kw_only=True, eq=False)
class Past:
    """What a trajectory holds so far.

    Attributes:
        tokens: Seen and sampled.
        last: The newest turn.
        homes: Where each turn is trained on.
        messages: Of its chat, with what the policy said; empty: plain text.
        tools: Of its chat.
        said_at: Which of the messages the policy said last.
        asked: Tokens of the messages that the policy has not answered yet.
    """

    tokens: list[int] = field(default_factory=list[int])
    last: Turn | None = None
    homes: dict[Turn, TrajectoryId] = field(default_factory=dict[Turn, TrajectoryId])
    messages: list[Message] = field(default_factory=list[Message])
    tools: tuple[Any, ...] = ()
    said_at: int | None = None
    asked: range | None = None


class Recorder:
    """One trajectory in the making: what the policy saw is masked, what it sampled is trained on.

    A chat goes on by `chat`, plain text by `observe`. One call of `sample` at a time.
    """

    def __init__(
        self,
        *,
        trajectory_id: TrajectoryId,
        port: PolicyPort,
        agent: str,
        seed: int | None,
        past: Past | None = None,
    ) -> None:
        """Start empty, or with the past of another; `Episode.trajectory` is the way to get one."""
        self._reward: float | None = None
        self.finish_reason = FinishReason.ABORT
        """Of the last generation; a workflow that ends for its own reason sets it."""
        self.policy_id = port.policy_id
        """Who samples."""
        self._trajectory_id = trajectory_id
        self._port = port
        self._agent = agent
        own = port.sampling
        self._sampling = own if seed == own.seed else replace(own, seed=seed)
        self._turns: list[Turn] = []
        self._turn_rewards: dict[int, float] = {}
        self._past = past or Past()

    @property
    def reward(self) -> float | None:
        """Where it differs from the rollout's. One that is not finite is INVALID_FIELD."""
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        if reward is not None and not isfinite(reward):
            raise _invalid(f"a trajectory's reward has to be finite, and is {reward}")
        self._reward = reward

    @property
    def past(self) -> Past:
        """A copy of what it holds so far."""
        past = self._past
        return replace(
            past, tokens=[*past.tokens], homes=dict(past.homes), messages=[*past.messages]
        )

    @property
    def messages(self) -> Sequence[Message]:
        """The chat so far, with what the policy said; empty: plain text."""
        return tuple(self._past.messages)

    @property
    def token_count(self) -> int:
        """Tokens so far, seen and sampled."""
        return len(self._past.tokens)

    @property
    def has_context(self) -> bool:
        """Whether the context has room for another token."""
        return self.token_count < self._port.engine.max_context_token_count

    @property
    def sampled_count(self) -> int:
        """Tokens sampled so far."""
        return sum(len(turn.generation.tokens) for turn in self._turns)

    @property
    def text(self) -> str:
        """All of it so far, special tokens left out."""
        return self._port.tokenizer.decode(self._past.tokens)

    def observe(self, content: str | Sequence[int]) -> None:
        """Add plain text that the policy is told. Masked.

        In a chat it is the beginning, or a part, of the policy's own turn.

        Args:
            content: Text, which at the start gets the model's start token where it has
                one; or token ids, taken as they are.
        """
        if isinstance(content, str):
            is_start = not self._past.tokens
            content = self._port.tokenizer.encode(content, add_special_tokens=is_start)
        self._past.tokens.extend(content)

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> None:
        """Add messages that the policy is told; what it samples next is the assistant's. Masked.

        The model's own template renders them. What was sampled stays as the tokens that it was:
        after an answer only what stands between it and the next one is rendered and encoded. With
        a model that has no template the contents follow each other, as with `observe`.

        Args:
            messages: As in OpenAI's API: role and content; not what the policy said itself. Told
                twice before an answer, they are rendered as one.
            tools: That the template shows, as JSON schemas of functions; given once, they stay.

        Raises:
            AstraflowError: INVALID_FIELD for messages that are none, or that the template does not
                take, and in a trajectory that began as plain text.
        """
        past = self._past
        if past.tokens and not past.messages:
            raise _invalid("the trajectory began as plain text; go on with observe, not with chat")
        asked = past.asked or range(len(past.tokens), len(past.tokens))
        if asked.stop != len(past.tokens):
            raise _invalid("text was observed after the messages of a chat; sample before the next")
        chat = [*past.messages, *normal_messages(messages)]
        tools = tuple(tools) or past.tools
        past.tokens[asked.start :] = self._rendered(chat, tools, at=asked.start)
        past.asked = range(asked.start, len(past.tokens))
        past.messages, past.tools = chat, tools

    async def sample(self, **overrides: Any) -> Reply:
        """Let the policy go on from here.

        Args:
            **overrides: Fields of SamplingParams that differ from the task's, from now on.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when there is no room for another token, and
                what the engine raises.
        """
        past = self._past
        wanted = replace(self._sampling, **overrides) if overrides else self._sampling
        before = self._turns[-1].sampling if self._turns else None
        generation, sampling = await self._port.generate(past.tokens, wanted, before=before)
        self._sampling = wanted
        return self._took(generation, sampling)

    def answer(self, text: str) -> Reply:
        """Take a stored text for what the policy says next, with the token that ends an answer.

        It is trained on like what was sampled; nobody knows its log-probabilities, which are 0.

        Raises:
            AstraflowError: INVALID_FIELD when it does not fit into the context.
        """
        port = self._port
        ids = [*port.tokenizer.encode(text), *(() if port.end_id is None else (port.end_id,))]
        length, limit = self.token_count + len(ids), port.engine.max_context_token_count
        if not ids or length > limit:
            what = "empty" if not ids else f"too long: {length} tokens with its prompt, of {limit}"
            raise _invalid(f"a stored answer is {what}; leave its row out")
        version = port.engine.version if port.version is None else port.version
        generation = Generation(
            tokens=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            version_spans=(VersionSpan(version=version or 0, length=len(ids)),),
            finish_reason=FinishReason.STOP,
        )
        # A trainer scores it under the model's own distribution.
        return self._took(generation, replace(self._sampling, temperature=1.0))

    def _took(self, generation: Generation, sampling: SamplingParams) -> Reply:
        """Keep what the policy said."""
        past, sampled = self._past, generation.tokens.tolist()
        if sampled:
            turn = Turn(
                parent=past.last,
                seen=np.array(past.tokens[past.last.end if past.last else 0 :], np.int32),
                generation=generation,
                sampling=sampling,
                start=len(past.tokens),
            )
            past.last, past.homes[turn] = turn, self._trajectory_id
            past.tokens.extend(sampled)
            self._turns.append(turn)
        self.finish_reason = generation.finish_reason
        text = self._port.tokenizer.decode(sampled)
        if self._past.messages:
            self._keep_answer(text)
        return Reply(
            text=text,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
        )

    def reward_turn(self, reward: float) -> None:
        """Reward what was sampled last, beside the reward of the whole; several times add up.

        Raises:
            AstraflowError: INVALID_FIELD when nothing was sampled yet, or it is not finite.
        """
        if not self._turns or not isfinite(reward):
            raise _invalid(f"a reward of {reward} for a turn needs a turn, and to be finite")
        end = self._turns[-1].end
        self._turn_rewards[end] = self._turn_rewards.get(end, 0.0) + reward

    def to_trajectory(self, *, segment_index: int) -> Trajectory:
        """Return what was recorded, up to the last sampled token; there has to be one."""
        port, before = self._port, self._turns[0].parent
        made = trajectory_of(
            self._turns,
            self.policy_id,
            engine=port.engine.name,
            agent=self._agent,
            name=self._trajectory_id,
            parent=self._past.homes[before] if before else None,
            index=segment_index,
            reward=self.reward,
            finish_reason=self.finish_reason,
        )
        if not self._turn_rewards:
            return made
        rewards = np.zeros(made.token_count, np.float32)
        for end, reward in self._turn_rewards.items():
            rewards[end - 1] = reward
        column = Column(axis=ColumnAxis.TOKEN, values=rewards)
        return replace(made, columns={**made.columns, TURN_REWARDS: column})

    def _rendered(self, chat: Sequence[Message], tools: Sequence[Any], *, at: int) -> Sequence[int]:
        """Return the tokens from `at`, where what the policy said ends, to its next words."""
        template, tokenizer = self._port.template, self._port.tokenizer
        roles = {message["role"] for message in chat}
        template.check.require(*roles & {"system", "tool"}, *(["tools"] if tools else []))
        if self._past.said_at is None:
            text = template.render(chat, tools)
            return tokenizer.encode(text, add_special_tokens=not template.has_start)
        tail = template.tail(chat, self._past.said_at, tools)
        if tail is None:
            template.check.require("history")
            raise _invalid(f"the chat template of {self.policy_id} loses what its assistant said")
        tokens = tokenizer.encode(tail)
        last = self._past.last
        return unended(last.generation, tokens) if last and last.end == at else tokens

    def _keep_answer(self, text: str) -> None:
        """Note what the assistant said; a generation right after another goes on with its words."""
        past = self._past
        if past.asked is None and past.said_at is not None:
            text = str(past.messages.pop()["content"]) + text
        past.asked, past.said_at = None, len(past.messages)
        past.messages.append({"role": "assistant", "content": text})


def _invalid(problem: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, problem, metadata={"field": "messages"})
