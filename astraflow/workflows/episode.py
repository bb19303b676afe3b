"""Episodes: one run of a workflow, and the recorders that keep every token of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import FinishReason, Trajectory, VersionSpan
from astraflow.core.tasks import Prompt, RolloutTask
from astraflow.engines.protocol import Generation
from astraflow.telemetry.traces import span
from astraflow.workflows.experts import expert_columns
from astraflow.workflows.ports import PolicyPort, Recorded, Reply
from astraflow.workflows.seeds import trajectory_seed

if TYPE_CHECKING:
    from astraflow.workflows.agents.door import AgentDoor


class Episode:
    """What a workflow is given for one rollout."""

    def __init__(
        self,
        *,
        task: RolloutTask,
        sample_index: int,
        policies: Mapping[PolicyId, PolicyPort],
        door: "AgentDoor | None" = None,
    ) -> None:
        """Start with no trajectory.

        Args:
            task: What was asked for.
            sample_index: Which of its samples this is.
            policies: In the workflow's order; the first is the default.
            door: Lets agents in that are not part of this process; None: nothing does.
        """
        self.task = task
        self.sample_index = sample_index
        self._policies = policies
        self._door = door
        self._recorders: list[Recorder] = []
        self._recorded: list[Recorded] = []

    @property
    def prompt(self) -> Prompt:
        """What to start from."""
        return self.task.prompt

    @property
    def rollout_id(self) -> RolloutId:
        """Unique for ever, because every attempt is a task of its own."""
        return RolloutId(f"{self.task.task_id}/{self.sample_index}")

    @property
    def policy_ids(self) -> tuple[PolicyId, ...]:
        """The policies that it may sample from, in the workflow's order."""
        return tuple(self._policies)

    def trajectory(self, policy_id: str | None = None, *, agent: str = "") -> "Recorder":
        """Start a trajectory.

        Each trajectory draws with a seed of its own, made from the sample's and from how
        many there were before, so start them in an order that does not depend on timing.

        Args:
            policy_id: Who samples, and trains on it; None: the first policy.
            agent: A name within the workflow, for people.

        Raises:
            AstraflowError: POLICY_UNKNOWN when the workflow does not sample from it.
        """
        index = len(self._recorders)
        port = self.port(policy_id)
        recorder = Recorder(
            trajectory_id=TrajectoryId(f"{self.rollout_id}/{index}"),
            port=port,
            agent=agent,
            seed=trajectory_seed(port.sampling.seed, index),
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
    def door(self) -> "AgentDoor":
        """What lets agents in.

        Raises:
            AstraflowError: CAPABILITY_MISSING when nothing does.
        """
        if self._door is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING, "agents are let in by rollout nodes alone; run it on one"
            )
        return self._door

    def attach(self, recorded: Recorded) -> None:
        """Train on what something else records, too."""
        self._recorded.append(recorded)

    @property
    def has_sampled(self) -> bool:
        """Whether any token was sampled yet."""
        return any(recorder.sampled_count for recorder in self._recorders) or any(
            recorded.has_sampled for recorded in self._recorded
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
        attached = (each for recorded in self._recorded for each in recorded.trajectories())
        return (*made, *attached)


class Recorder:
    """One trajectory in the making: what the policy saw is masked, what it sampled is trained on.

    One call of `sample` at a time.
    """

    def __init__(
        self, *, trajectory_id: TrajectoryId, port: PolicyPort, agent: str, seed: int | None
    ) -> None:
        """Start empty; `Episode.trajectory` is the way to get one."""
        self.reward: float | None = None
        """Where it differs from the rollout's."""
        self.finish_reason = FinishReason.ABORT
        """Of the last generation; a workflow that ends for its own reason sets it."""
        self._trajectory_id = trajectory_id
        self._port = port
        self._agent = agent
        self._sampling = replace(port.sampling, seed=seed)
        self._tokens: list[int] = []
        self._generations: list[tuple[int, Generation]] = []

    @property
    def policy_id(self) -> PolicyId:
        """Who samples."""
        return self._port.policy_id

    @property
    def token_count(self) -> int:
        """Tokens so far, seen and sampled."""
        return len(self._tokens)

    @property
    def sampled_count(self) -> int:
        """Tokens sampled so far."""
        return sum(len(generation.tokens) for _, generation in self._generations)

    @property
    def text(self) -> str:
        """All of it so far, special tokens left out."""
        return self._port.tokenizer.decode(self._tokens)

    def observe(self, content: str | Sequence[int]) -> None:
        """Add what the policy is told: a prompt, or what the environment says. Masked.

        Args:
            content: Text, which at the start gets the model's start token where it has
                one; or token ids, taken as they are.
        """
        if isinstance(content, str):
            is_start = not self._tokens
            content = self._port.tokenizer.encode(content, add_special_tokens=is_start)
        self._tokens.extend(content)

    async def sample(self, **overrides: Any) -> Reply:
        """Let the policy go on from here.

        Args:
            **overrides: Fields of SamplingParams that differ from the task's.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when there is no room for another token, and
                what the engine raises.
        """
        port = self._port
        sampling = port.fit(
            replace(self._sampling, **overrides),
            len(self._tokens),
            before=self._sampling if self._generations else None,
        )
        start = len(self._tokens)
        with span("gen_ai.generate", prompt_token_count=start, policy=self.policy_id):
            generation = await port.engine.generate(self._tokens, sampling, version=port.version)
        sampled = generation.tokens.tolist()
        self._tokens.extend(sampled)
        self._generations.append((start, generation))
        self._sampling = sampling
        self.finish_reason = generation.finish_reason
        return Reply(
            text=port.tokenizer.decode(sampled),
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
        )

    def to_trajectory(self, *, segment_index: int) -> Trajectory:
        """Return what was recorded."""
        length = len(self._tokens)
        mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        spans: list[VersionSpan] = []
        for start, generation in self._generations:
            end = start + len(generation.tokens)
            mask[start:end] = True
            logprobs[start:end] = generation.logprobs
            spans.extend(generation.version_spans)
        return Trajectory(
            trajectory_id=self._trajectory_id,
            policy_id=self._port.policy_id,
            agent=self._agent,
            tokens=np.array(self._tokens, np.int32),
            sampled_mask=mask,
            logprobs=logprobs,
            version_spans=tuple(spans),
            sampling=self._sampling,
            finish_reason=self.finish_reason,
            segment_index=segment_index,
            reward=self.reward,
            columns=expert_columns(length, [generation for _, generation in self._generations]),
            engine=self._port.engine.name,
        )
