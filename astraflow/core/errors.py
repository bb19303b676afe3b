"""What can go wrong: one table of reasons, one exception, one record.

`AstraflowError` is raised where a call cannot go on; `Failure` is kept where one item
failed and the call went well. Both speak with a `Reason`, on the wire as in Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Names what went wrong; the comments in `common/v1/failure.proto` explain each."""

    TOKEN_INVALID = "TOKEN_INVALID"  # noqa: S105 - a reason, not a secret
    SESSION_ENDED = "SESSION_ENDED"
    SESSION_FENCED = "SESSION_FENCED"
    ROLE_NOT_ALLOWED = "ROLE_NOT_ALLOWED"
    CONTRACT_UNSUPPORTED = "CONTRACT_UNSUPPORTED"
    INVALID_FIELD = "INVALID_FIELD"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    OVERLOADED = "OVERLOADED"
    NOT_READY = "NOT_READY"
    RUN_ENDED = "RUN_ENDED"
    JOURNAL_FAILED = "JOURNAL_FAILED"
    REQUEST_CONFLICT = "REQUEST_CONFLICT"
    INTERNAL = "INTERNAL"
    MEMBER_UNKNOWN = "MEMBER_UNKNOWN"
    NAME_TAKEN = "NAME_TAKEN"
    POLICY_UNKNOWN = "POLICY_UNKNOWN"
    POLICY_TAKEN = "POLICY_TAKEN"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    PROMPT_UNKNOWN = "PROMPT_UNKNOWN"
    CODE_UNKNOWN = "CODE_UNKNOWN"
    CODE_MISMATCH = "CODE_MISMATCH"
    TASK_UNKNOWN = "TASK_UNKNOWN"
    TASK_EXPIRED = "TASK_EXPIRED"
    TASK_CANCELLED = "TASK_CANCELLED"
    MEMBER_DRAINING = "MEMBER_DRAINING"
    MEMBER_LOST = "MEMBER_LOST"
    CAPACITY_EXCEEDED = "CAPACITY_EXCEEDED"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    ROLLOUT_INVALID = "ROLLOUT_INVALID"
    DUPLICATE = "DUPLICATE"
    STALE = "STALE"
    FILTERED = "FILTERED"
    GROUP_INCOMPLETE = "GROUP_INCOMPLETE"
    BUFFER_FULL = "BUFFER_FULL"
    BATCH_DISCARDED = "BATCH_DISCARDED"
    PROMPT_POISONED = "PROMPT_POISONED"
    ENGINE_FAILED = "ENGINE_FAILED"
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED"
    ROLLOUT_TIMEOUT = "ROLLOUT_TIMEOUT"
    SCORER_FAILED = "SCORER_FAILED"
    SCORER_TIMEOUT = "SCORER_TIMEOUT"
    BATCH_UNKNOWN = "BATCH_UNKNOWN"
    LEASE_LOST = "LEASE_LOST"
    CHECKPOINT_UNKNOWN = "CHECKPOINT_UNKNOWN"
    VERSION_NOT_NEXT = "VERSION_NOT_NEXT"
    VERSION_UNKNOWN = "VERSION_UNKNOWN"
    VERSION_EVICTED = "VERSION_EVICTED"
    VERSION_NOT_SERVED = "VERSION_NOT_SERVED"
    LAYOUT_UNKNOWN = "LAYOUT_UNKNOWN"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    PATCH_UNKNOWN = "PATCH_UNKNOWN"
    LANE_UNAVAILABLE = "LANE_UNAVAILABLE"
    SOURCE_UNREACHABLE = "SOURCE_UNREACHABLE"
    SOURCE_TIMEOUT = "SOURCE_TIMEOUT"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    CHUNK_INVALID = "CHUNK_INVALID"
    MEMORY_EXCEEDED = "MEMORY_EXCEEDED"
    APPLY_FAILED = "APPLY_FAILED"
    EVAL_UNKNOWN = "EVAL_UNKNOWN"
    CAPABILITY_MISSING = "CAPABILITY_MISSING"
    POLICY_FAULT = "POLICY_FAULT"
    PAYLOAD_LOST = "PAYLOAD_LOST"
    SIGNATURE_INVALID = "SIGNATURE_INVALID"


CONFIGURATION_EXIT = 78
"""Exit code of a role that cannot work as it is set up (EX_CONFIG of sysexits.h)."""
TEMPORARY_EXIT = 75
"""Exit code of a hub that goes on when it is started again (EX_TEMPFAIL): its database is away, or
its run failed to decide."""
BLOCKED_EXIT = 70
"""Exit code of a node whose event loop code of a user's blocks for good (EX_SOFTWARE)."""

# Starting again would come to the same.
_OF_CONFIGURATION = frozenset(
    {
        Reason.CAPABILITY_MISSING,
        Reason.CODE_MISMATCH,
        Reason.CODE_UNKNOWN,
        Reason.CONTRACT_UNSUPPORTED,
        Reason.INVALID_FIELD,
        Reason.MODEL_MISMATCH,
        Reason.POLICY_UNKNOWN,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one item failed.

    Attributes:
        reason: The table entry.
        message: For people; never parsed.
        retryable: Whether another attempt may go well.
        metadata: Ids and limits by name.
        cause: What equal failures have in common, such as "KeyError at my_workflows.py:22";
            empty: the reason alone.
        traceback: Down to the line of the user's code; empty where it was told before.
    """

    reason: Reason
    message: str = ""
    retryable: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    cause: str = ""
    traceback: str = ""

    def shortened(self) -> Self:
        """Return it with no more of each text than members that keep to the contract send."""
        metadata = self.metadata
        if sum(map(len, metadata)) + sum(map(len, metadata.values())) > _MAX_CHARS:
            metadata = {}
        elif max(len(self.message), len(self.cause), len(self.traceback)) <= _MAX_CHARS:
            return self
        # The end of a traceback matters most.
        return replace(
            self,
            message=self.message[:_MAX_CHARS],
            metadata=metadata,
            cause=self.cause[:_MAX_CHARS],
            traceback=self.traceback[-_MAX_CHARS:],
        )

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" + (f"\n{self.traceback}" if self.traceback else "")


_MAX_CHARS = 4096


class AstraflowError(Exception):
    """A call that cannot go on: which thing, why, and what to do about it.

    Example:
        >>> raise AstraflowError(Reason.LEASE_LOST, "batch b7 is held by another trainer")
        Traceback (most recent call last):
        ...
        astraflow.core.errors.AstraflowError: LEASE_LOST: batch b7 is held by another trainer
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retryable: bool = False,
        metadata: Mapping[str, str] | None = None,
        cause: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.retryable = retryable
        self.metadata = dict(metadata or {})
        self.cause = cause
        self.traceback = traceback

    @property
    def exit_code(self) -> int:
        """Of the process that it ends: whether another start changes something."""
        if self.reason in (Reason.JOURNAL_FAILED, Reason.INTERNAL) and self.retryable:
            return TEMPORARY_EXIT
        return CONFIGURATION_EXIT if self.reason in _OF_CONFIGURATION else 1

    def to_failure(self) -> Failure:
        return Failure(
            reason=self.reason,
            message=self.message,
            retryable=self.retryable,
            metadata=self.metadata,
            cause=self.cause,
            traceback=self.traceback,
        )
