from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_TOKEN_INVALID: _ClassVar[Reason]
    REASON_SESSION_ENDED: _ClassVar[Reason]
    REASON_SESSION_FENCED: _ClassVar[Reason]
    REASON_ROLE_NOT_ALLOWED: _ClassVar[Reason]
    REASON_CONTRACT_UNSUPPORTED: _ClassVar[Reason]
    REASON_INVALID_FIELD: _ClassVar[Reason]
    REASON_MESSAGE_TOO_LARGE: _ClassVar[Reason]
    REASON_OVERLOADED: _ClassVar[Reason]
    REASON_NOT_READY: _ClassVar[Reason]
    REASON_RUN_ENDED: _ClassVar[Reason]
    REASON_JOURNAL_FAILED: _ClassVar[Reason]
    REASON_REQUEST_CONFLICT: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_MEMBER_UNKNOWN: _ClassVar[Reason]
    REASON_NAME_TAKEN: _ClassVar[Reason]
    REASON_POLICY_UNKNOWN: _ClassVar[Reason]
    REASON_POLICY_TAKEN: _ClassVar[Reason]
    REASON_MODEL_MISMATCH: _ClassVar[Reason]
    REASON_PROMPT_UNKNOWN: _ClassVar[Reason]
    REASON_CODE_UNKNOWN: _ClassVar[Reason]
    REASON_CODE_MISMATCH: _ClassVar[Reason]
    REASON_TASK_UNKNOWN: _ClassVar[Reason]
    REASON_TASK_EXPIRED: _ClassVar[Reason]
    REASON_TASK_CANCELLED: _ClassVar[Reason]
    REASON_MEMBER_DRAINING: _ClassVar[Reason]
    REASON_MEMBER_LOST: _ClassVar[Reason]
    REASON_CAPACITY_EXCEEDED: _ClassVar[Reason]
    REASON_CONTEXT_TOO_LONG: _ClassVar[Reason]
    REASON_ROLLOUT_INVALID: _ClassVar[Reason]
    REASON_DUPLICATE: _ClassVar[Reason]
    REASON_STALE: _ClassVar[Reason]
    REASON_FILTERED: _ClassVar[Reason]
    REASON_GROUP_INCOMPLETE: _ClassVar[Reason]
    REASON_BUFFER_FULL: _ClassVar[Reason]
    REASON_BATCH_DISCARDED: _ClassVar[Reason]
    REASON_PROMPT_POISONED: _ClassVar[Reason]
    REASON_ENGINE_FAILED: _ClassVar[Reason]
    REASON_ENVIRONMENT_FAILED: _ClassVar[Reason]
    REASON_ROLLOUT_TIMEOUT: _ClassVar[Reason]
    REASON_SCORER_FAILED: _ClassVar[Reason]
    REASON_SCORER_TIMEOUT: _ClassVar[Reason]
    REASON_BATCH_UNKNOWN: _ClassVar[Reason]
    REASON_LEASE_LOST: _ClassVar[Reason]
    REASON_CHECKPOINT_UNKNOWN: _ClassVar[Reason]
    REASON_VERSION_NOT_NEXT: _ClassVar[Reason]
    REASON_VERSION_UNKNOWN: _ClassVar[Reason]
    REASON_VERSION_EVICTED: _ClassVar[Reason]
    REASON_VERSION_NOT_SERVED: _ClassVar[Reason]
    REASON_LAYOUT_UNKNOWN: _ClassVar[Reason]
    REASON_LAYOUT_MISMATCH: _ClassVar[Reason]
    REASON_PATCH_UNKNOWN: _ClassVar[Reason]
    REASON_LANE_UNAVAILABLE: _ClassVar[Reason]
    REASON_SOURCE_UNREACHABLE: _ClassVar[Reason]
    REASON_SOURCE_TIMEOUT: _ClassVar[Reason]
    REASON_DIGEST_MISMATCH: _ClassVar[Reason]
    REASON_CHUNK_INVALID: _ClassVar[Reason]
    REASON_MEMORY_EXCEEDED: _ClassVar[Reason]
    REASON_APPLY_FAILED: _ClassVar[Reason]
    REASON_EVAL_UNKNOWN: _ClassVar[Reason]
    REASON_CAPABILITY_MISSING: _ClassVar[Reason]
    REASON_POLICY_FAULT: _ClassVar[Reason]
    REASON_PAYLOAD_LOST: _ClassVar[Reason]
    REASON_SIGNATURE_INVALID: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_TOKEN_INVALID: Reason
REASON_SESSION_ENDED: Reason
REASON_SESSION_FENCED: Reason
REASON_ROLE_NOT_ALLOWED: Reason
REASON_CONTRACT_UNSUPPORTED: Reason
REASON_INVALID_FIELD: Reason
REASON_MESSAGE_TOO_LARGE: Reason
REASON_OVERLOADED: Reason
REASON_NOT_READY: Reason
REASON_RUN_ENDED: Reason
REASON_JOURNAL_FAILED: Reason
REASON_REQUEST_CONFLICT: Reason
REASON_INTERNAL: Reason
REASON_MEMBER_UNKNOWN: Reason
REASON_NAME_TAKEN: Reason
REASON_POLICY_UNKNOWN: Reason
REASON_POLICY_TAKEN: Reason
REASON_MODEL_MISMATCH: Reason
REASON_PROMPT_UNKNOWN: Reason
REASON_CODE_UNKNOWN: Reason
REASON_CODE_MISMATCH: Reason
REASON_TASK_UNKNOWN: Reason
REASON_TASK_EXPIRED: Reason
REASON_TASK_CANCELLED: Reason
REASON_MEMBER_DRAINING: Reason
REASON_MEMBER_LOST: Reason
REASON_CAPACITY_EXCEEDED: Reason
REASON_CONTEXT_TOO_LONG: Reason
REASON_ROLLOUT_INVALID: Reason
REASON_DUPLICATE: Reason
REASON_STALE: Reason
REASON_FILTERED: Reason
REASON_GROUP_INCOMPLETE: Reason
REASON_BUFFER_FULL: Reason
REASON_BATCH_DISCARDED: Reason
REASON_PROMPT_POISONED: Reason
REASON_ENGINE_FAILED: Reason
REASON_ENVIRONMENT_FAILED: Reason
REASON_ROLLOUT_TIMEOUT: Reason
REASON_SCORER_FAILED: Reason
REASON_SCORER_TIMEOUT: Reason
REASON_BATCH_UNKNOWN: Reason
REASON_LEASE_LOST: Reason
REASON_CHECKPOINT_UNKNOWN: Reason
REASON_VERSION_NOT_NEXT: Reason
REASON_VERSION_UNKNOWN: Reason
REASON_VERSION_EVICTED: Reason
REASON_VERSION_NOT_SERVED: Reason
REASON_LAYOUT_UNKNOWN: Reason
REASON_LAYOUT_MISMATCH: Reason
REASON_PATCH_UNKNOWN: Reason
REASON_LANE_UNAVAILABLE: Reason
REASON_SOURCE_UNREACHABLE: Reason
REASON_SOURCE_TIMEOUT: Reason
REASON_DIGEST_MISMATCH: Reason
REASON_CHUNK_INVALID: Reason
REASON_MEMORY_EXCEEDED: Reason
REASON_APPLY_FAILED: Reason
REASON_EVAL_UNKNOWN: Reason
REASON_CAPABILITY_MISSING: Reason
REASON_POLICY_FAULT: Reason
REASON_PAYLOAD_LOST: Reason
REASON_SIGNATURE_INVALID: Reason

class Failure(_message.Message):
    __slots__ = ("reason", "message", "retryable", "metadata", "cause", "traceback")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    retryable: bool
    metadata: _containers.ScalarMap[str, str]
    cause: str
    traceback: str
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., metadata: _Optional[_Mapping[str, str]] = ..., cause: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...
