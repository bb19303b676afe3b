"""Events: all that can happen to a run, with what it needs to be decided the same way again.

`Run.apply(event, now)` answers each with the type named in its docstring and raises
AstraflowError where the call cannot go on; an event that raised changed nothing. Secrets are
made outside and carried in, so that a replay of the same events gives the same run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from astraflow.core.batches import AckBatch, StreamBatches
from astraflow.core.errors import Failure
from astraflow.core.frozen import fast_init
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, PromptId, RolloutId, TaskId
from astraflow.core.members import JoinPool, RaasLoad, RegisterTrainer, TrainerLoad
from astraflow.core.rollouts import Rollout, TaskResult
from astraflow.core.status import StopMode
from astraflow.core.tasks import Prompt, TaskCredit
from astraflow.core.versions import VersionInfo, VersionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOffered:
    """The hub drew training prompts, as DrawPrompts or DrawAgain asked. Answer: None.

    Attributes:
        prompts: The next rows.
        data_set: Of which data set; empty: the run has one.
        is_last: No prompt follows: the data set is through.
        is_again: Whether they were drawn before, of any data set.
    """

    prompts: tuple[Prompt, ...]
    data_set: str = ""
    is_last: bool = False
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequeued:
    """An operator has a dead letter issued again, its attempts forgotten. Answer: None.

    One that was issued again already changes nothing while its prompt is open.

    Raises:
        AstraflowError: PROMPT_UNKNOWN, RUN_ENDED.
    """

    prompt_id: PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPromptsOffered:
    """The hub read the data sets of an evaluation, as DrawEvalPrompts asked. Answer: None.

    Attributes:
        prompts: The next rows, by data set.
        goes_on: Whether more of them follow.
    """

    eval_run_id: EvalRunId
    prompts: Mapping[str, tuple[Prompt, ...]]
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCreated:
    """Somebody asks for an evaluation. Answer: EvalRun; the same for a repeated request_id.

    Attributes:
        request_id: Chosen by the caller, not empty.
        versions: A policy left out: its newest.
        pool_share: Above 0, at most 1; None: the suite's.

    Raises:
        AstraflowError: EVAL_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED, VERSION_NOT_SERVED
            when no RaaS can serve them any more, REQUEST_CONFLICT, INVALID_FIELD, RUN_ENDED.
    """

    request_id: str
    suite: str
    versions: Mapping[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    pool_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCancelled:
    """Somebody stops an evaluation. Answer: EvalRun.

    Raises:
        AstraflowError: EVAL_UNKNOWN.
    """

    eval_run_id: EvalRunId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused:
    """An operator stops new tasks. Answer: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """An operator lets tasks flow again. Answer: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """An operator asks for a checkpoint of the run. Answer: None; `Run.saved` tells when it is.

    Raises:
        AstraflowError: INVALID_FIELD, RUN_ENDED; NOT_READY when a trainer is missing.
    """

    checkpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """An operator ends the run. Answer: None.

    Attributes:
        mode: DRAIN finishes what is out and trains on it; CANCEL drops it.
        grace: Then a drain becomes a cancel; None: no limit.
    """

    mode: StopMode
    grace: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBroken:
    """The hub cannot go on, such as with a data set that it cannot read. Answer: None."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRestarted:
    """The hub came back with the state that its journal holds. Answer: None.

    Every session is renewed, and what the hub was about to do for itself is asked for again. What
    was on its way to a member is sent again when the member resumes its session.

    Raises RUN_ENDED when it is to go on and every policy has done its steps, or no prompt is left.

    Attributes:
        software: Release of the hub; empty: it does not say.
        step_counts: Not empty: a run that was stopped, failed or reached its end goes on, and each
            policy trains on so many batches in all; 0: until the data ends.
    """

    software: str = ""
    step_counts: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed: `Run.next_deadline` is reached. Answer: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSecrets:
    """What the hub mints for a session.

    Attributes:
        token: Of the session.
        transfer_token: Of the run, shared by all members.
        token_id: Of the token of a role that the member came with; empty: of no such token.
        is_relay: Whether that lets it relay weights, and take no tasks.
    """

    token: bytes = field(repr=False)
    transfer_token: bytes = field(repr=False)
    token_id: str = ""
    is_relay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRegistered:
    """A trainer joins, or comes back. Answer: TrainerRegistration.

    Attributes:
        resumes: Whose token `request.resume.resume_token` is or was; None: a new member.

    Raises:
        AstraflowError: POLICY_UNKNOWN, POLICY_TAKEN, CONTRACT_UNSUPPORTED, MODEL_MISMATCH,
            INVALID_FIELD for another groups_per_batch than the run's, SESSION_FENCED for an
            older incarnation, RUN_ENDED.
    """

    request: RegisterTrainer
    secrets: SessionSecrets
    resumes: MemberId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaasJoined:
    """A RaaS joins, or comes back. Answer: PoolMembership.

    Attributes:
        resumes: Whose token `request.resume.resume_token` is or was; None: a new member.

    Raises:
        AstraflowError: NAME_TAKEN, POLICY_UNKNOWN, CONTRACT_UNSUPPORTED, MODEL_MISMATCH,
            CODE_UNKNOWN, CODE_MISMATCH, SESSION_FENCED for an older incarnation, RUN_ENDED.
    """

    request: JoinPool
    secrets: SessionSecrets
    resumes: MemberId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKeptAlive:
    """A member renews its session. Answer: Renewal.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    load: RaasLoad | TrainerLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReported:
    """A member tells of what belongs to no rollout. Answer: None.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """A member ends its session. Answer: None; an ended one answers the same."""

    member_id: MemberId
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDrained:
    """An operator lets a member finish and leave. Answer: None.

    Attributes:
        grace: Then its session is ended; None: no limit.

    Raises:
        AstraflowError: MEMBER_UNKNOWN.
    """

    member_id: MemberId
    grace: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A trainer announces weights. Answer: int, what its next one must be numbered.

    Raises:
        AstraflowError: SESSION_ENDED, ROLE_NOT_ALLOWED for another policy's trainer,
            VERSION_NOT_NEXT, REQUEST_CONFLICT.
    """

    member_id: MemberId
    info: VersionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequested:
    """A RaaS asks for a version with more steps. Answer: PublishAnswer.

    Raises:
        AstraflowError: SESSION_ENDED, POLICY_UNKNOWN; NOT_READY without a trainer.
    """

    member_id: MemberId
    policy_id: PolicyId


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReported:
    """A RaaS says where a version stands on it. Answer: None.

    Raises:
        AstraflowError: SESSION_ENDED, POLICY_UNKNOWN, VERSION_UNKNOWN.
    """

    member_id: MemberId
    report: VersionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNacked:
    """A RaaS gives a task back unstarted. Answer: None; one that it does not hold is ignored."""

    member_id: MemberId
    task_id: TaskId
    failure: Failure


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutArrived:
    """A RaaS sends a rollout. Answer: ItemAck.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRepeated:
    """A RaaS sends a rollout whose sample is settled. Answer: ItemAck.

    It stands for a RolloutArrived of which `Run.refusal` says so, and holds no tokens.

    Attributes:
        policy_ids: In whose books it counts.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    rollout_id: RolloutId
    policy_ids: tuple[PolicyId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished:
    """A RaaS closes a task. Answer: ItemAck.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    result: TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRevoked:
    """An operator takes a token of a role back; who may call knows that. Answer: None."""

    token_id: str


Event = (
    StreamBatches
    | AckBatch
    | PromptsOffered
    | PromptRequeued
    | EvalPromptsOffered
    | EvalCreated
    | EvalCancelled
    | RunPaused
    | RunResumed
    | SaveRequested
    | RunStopped
    | RunBroken
    | HubRestarted
    | Ticked
    | TrainerRegistered
    | RaasJoined
    | MemberKeptAlive
    | FailureReported
    | MemberLeft
    | MemberDrained
    | TokenRevoked
    | VersionPublished
    | PublishRequested
    | VersionReported
    | TaskCredit
    | TaskNacked
    | RolloutArrived
    | RolloutRepeated
    | TaskFinished
)
