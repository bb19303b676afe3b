"""Session events: members join, renew, leave, and are asked to."""

from dataclasses import dataclass, field
from datetime import timedelta

from astraflow.core.errors import Failure
from astraflow.core.ids import MemberId
from astraflow.core.members import JoinPool, RaasLoad, RegisterTrainer, TrainerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSecrets:
    """What the hub mints for a session.

    Attributes:
        token: Of the session.
        transfer_token: Of the run, shared by all members.
    """

    token: bytes = field(repr=False)
    transfer_token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRegistered:
    """A trainer joins, or comes back. Answer: TrainerRegistration.

    Attributes:
        request: What it says.
        secrets: For its session.
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
        request: What it says.
        secrets: For its session.
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
        member_id: Who.
        grace: Then its session is ended; None: no limit.

    Raises:
        AstraflowError: MEMBER_UNKNOWN.
    """

    member_id: MemberId
    grace: timedelta | None = None


SessionEvent = (
    TrainerRegistered | RaasJoined | MemberKeptAlive | FailureReported | MemberLeft | MemberDrained
)
