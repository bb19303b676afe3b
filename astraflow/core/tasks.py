"""Tasks: what is asked of a RaaS, and the code and prompt it is asked with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import (
    NOBODY,
    EvalRunId,
    GroupId,
    MemberId,
    PolicyId,
    PromptId,
    TaskId,
    WorkflowId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a completion has to be; at least one of both.

    Attributes:
        answer: JSON schema, as text, of an answer that is nothing but JSON.
        call: JSON schema, as text, of a tool call, which stands between the tags `<tool_call>` and
            `</tool_call>`.
    """

    answer: str | None = None
    call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The knobs of one generation; the defaults sample from the model's own distribution.

    Attributes:
        temperature: 0 is greedy.
        top_p: Mass kept, in (0, 1].
        top_k: Tokens kept; None: all.
        min_p: Tokens kept have at least this share of the likeliest one's probability.
        max_new_tokens: Per generation; 0: up to the model's context.
        min_new_tokens: No stop before this many.
        stop_token_ids: Beside the model's own end tokens.
        stop_strings: Texts that end the generation; the matching tokens are kept.
        frequency_penalty: 0 is off.
        presence_penalty: 0 is off.
        repetition_penalty: 1 is off.
        seed: None: chosen by the engine.
        ignore_eos: Go on past the model's end tokens.
        grammar: Takes away what does not fit it. Which draws it changed is in the generation;
            they are not trained on, so that it is no knob of `reshaped_by`. It is an agent's wish
            for one completion, and so is the next: neither goes over the wire.
        top_logprobs: So many of the likeliest tokens are told of beside each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None
    top_logprobs: int = 0

    @property
    def is_reshaped(self) -> bool:
        """Whether `reshaped_by` names any knob."""
        return (
            self.temperature == 0
            or self.top_p < 1
            or self.top_k is not None
            or self.min_p > 0
            or self.min_new_tokens > 0
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def reshaped_by(self) -> tuple[str, ...]:
        """Knobs that are set and draw tokens from another distribution than softmax(logits / T).

        A trainer scores tokens under that one, over the whole vocabulary: of tokens drawn otherwise
        its ratio is not 1 at equal weights, so they are not trained on (ADR 12).
        """
        is_set = {
            "temperature": self.temperature == 0,
            "top_p": self.top_p < 1,
            "top_k": self.top_k is not None,
            "min_p": self.min_p > 0,
            "min_new_tokens": self.min_new_tokens > 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "presence_penalty": self.presence_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1,
        }
        return tuple(name for name, value in is_set.items() if value)

    def require_trainable(self) -> None:
        """Refuse knobs under which what is sampled cannot be trained on.

        Raises:
            AstraflowError: INVALID_FIELD naming them.
        """
        names = self.reshaped_by
        if names:
            shown = ", ".join(f"{name} = {getattr(self, name)!r}" for name in names)
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{shown} in training: a trainer scores tokens under softmax(logits / temperature) "
                "of the whole vocabulary, so the ratio of tokens drawn otherwise is wrong from the "
                "start; leave it out here, or set it for an evaluation (evals.*.sampling)",
                metadata={"field": f"sampling.{names[0]}"},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCode:
    """Code that a member has, by name; code never travels.

    Attributes:
        name: As registered, such as single_turn.
        code_digest: BLAKE3 of the source, 32 bytes; empty: not compared.
    """

    name: str
    code_digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """Code that turns a prompt into rollouts, and its options.

    Attributes:
        workflow_id: Unique in the run.
        code: The workflow.
        options: One JSON object; checked by the workflow.
        scorer: None: the workflow scores.
        scorer_options: One JSON object; checked by the scorer.
        policy_ids: Policies that it samples from.
        policy_fault_reward: Of a rollout that the policy broke, where the fault has none of its
            own.
    """

    workflow_id: WorkflowId
    code: RegisteredCode
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scorer: RegisteredCode | None = None
    scorer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    policy_ids: tuple[PolicyId, ...]
    policy_fault_reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set: what a workflow starts from.

    Attributes:
        prompt_id: Stable across epochs and restarts, unique in the run.
        data_set: Its name in the recipe.
        epoch: 0 for the first pass.
        fields: What the workflow reads: one JSON object.
        blobs: What does not fit JSON.
        labels: What routing and filters read.
    """

    prompt_id: PromptId
    data_set: str
    epoch: int = 0
    fields: Mapping[str, Any]
    blobs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class TaskPurpose(StrEnum):
    """What the rollouts of a task are for."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Bounds a version, both ends included; None: any."""

    min: int | None = None
    max: int | None = None

    def __contains__(self, version: int) -> bool:
        return (self.min is None or version >= self.min) and (
            self.max is None or version <= self.max
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """Rollouts of one prompt, asked of one RaaS; see `rollout/v1/task.proto`.

    Attributes:
        task_id: New for every attempt.
        group_id: Stable over attempts.
        attempt: 0 for the first issue of these samples.
        purpose: Training or evaluation.
        workflow_id: One of those the run named at the join.
        prompt: What to start from.
        sample_indexes: Each at least 0, no two equal.
        versions: What each policy may sample with.
        sampling: Defaults for the workflow, by policy. A seed in it is the run's; the
            RaaS derives that of each sample from it.
        deadline: After this no result is wanted.
        timeout: For one rollout; None: none.
        priority: Larger first.
        session_affinity: Equal values are best served by one engine.
        eval_run_id: Set for an evaluation.
        traceparent: W3C trace context.
    """

    task_id: TaskId
    group_id: GroupId
    attempt: int = 0
    purpose: TaskPurpose
    workflow_id: WorkflowId
    prompt: Prompt
    sample_indexes: tuple[int, ...]
    versions: Mapping[PolicyId, VersionRange]
    sampling: Mapping[PolicyId, SamplingParams]
    deadline: datetime | None = None
    timeout: timedelta | None = None
    priority: int = 0
    session_affinity: str = ""
    eval_run_id: EvalRunId | None = None
    traceparent: str = ""


class CancelReason(StrEnum):
    """Why a task is no longer wanted."""

    STALE = "stale"
    GROUP_DONE = "group_done"
    EVAL_CANCELLED = "eval_cancelled"
    DEADLINE = "deadline"
    STOP = "stop"
    VERSION_LOST = "version_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCredit:
    """A RaaS bounds its work from now on; less than what is out cancels none. Answer: None.

    Attributes:
        member_id: Who; the hub knows it by the stream's session.
        max_outstanding: Samples without an accepted rollout in its unfinished tasks; 0 pauses.
        max_eval_outstanding: Of these, for evaluations; None: all.
        max_eval_extra: Samples of evaluations beyond `max_outstanding`.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId = NOBODY
    max_outstanding: int
    max_eval_outstanding: int | None = None
    max_eval_extra: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCancellation:
    """Withdraws a task, or some samples of it; its result is still due.

    Attributes:
        reason: Why it is not wanted.
        sample_indexes: Empty: all.
    """

    task_id: TaskId
    reason: CancelReason
    sample_indexes: tuple[int, ...] = ()
