"""Version events: weights are announced, asked for, and served."""

from dataclasses import dataclass

from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.versions import VersionInfo, VersionReport


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


VersionEvent = VersionPublished | PublishRequested | VersionReported
