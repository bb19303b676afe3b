import datetime

from astraflow_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from astraflow_proto.rollout.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskPurpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_PURPOSE_UNSPECIFIED: _ClassVar[TaskPurpose]
    TASK_PURPOSE_TRAIN: _ClassVar[TaskPurpose]
    TASK_PURPOSE_EVAL: _ClassVar[TaskPurpose]
TASK_PURPOSE_UNSPECIFIED: TaskPurpose
TASK_PURPOSE_TRAIN: TaskPurpose
TASK_PURPOSE_EVAL: TaskPurpose

class RolloutTask(_message.Message):
    __slots__ = ("task_id", "group_id", "attempt", "purpose", "workflow_id", "prompt", "sample_indexes", "versions", "sampling", "deadline", "timeout", "priority", "session_affinity", "eval_run_id", "prefixes", "traceparent")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: VersionRange
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[VersionRange, _Mapping]] = ...) -> None: ...
    class SamplingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _sampling_pb2.SamplingParams
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ...) -> None: ...
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_AFFINITY_FIELD_NUMBER: _ClassVar[int]
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    group_id: str
    attempt: int
    purpose: TaskPurpose
    workflow_id: str
    prompt: Prompt
    sample_indexes: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.MessageMap[str, VersionRange]
    sampling: _containers.MessageMap[str, _sampling_pb2.SamplingParams]
    deadline: _timestamp_pb2.Timestamp
    timeout: _duration_pb2.Duration
    priority: int
    session_affinity: str
    eval_run_id: str
    prefixes: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    traceparent: str
    def __init__(self, task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., attempt: _Optional[int] = ..., purpose: _Optional[_Union[TaskPurpose, str]] = ..., workflow_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sample_indexes: _Optional[_Iterable[int]] = ..., versions: _Optional[_Mapping[str, VersionRange]] = ..., sampling: _Optional[_Mapping[str, _sampling_pb2.SamplingParams]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., session_affinity: _Optional[str] = ..., eval_run_id: _Optional[str] = ..., prefixes: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VersionRange(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "data_set", "epoch", "data_json", "blobs", "labels")
    class BlobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    data_set: str
    epoch: int
    data_json: bytes
    blobs: _containers.ScalarMap[str, bytes]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, prompt_id: _Optional[str] = ..., data_set: _Optional[str] = ..., epoch: _Optional[int] = ..., data_json: _Optional[bytes] = ..., blobs: _Optional[_Mapping[str, bytes]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Workflow(_message.Message):
    __slots__ = ("workflow_id", "code", "options_json", "scorer", "scorer_options_json", "policy_ids", "policy_fault_reward")
    WORKFLOW_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    SCORER_OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    POLICY_IDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FAULT_REWARD_FIELD_NUMBER: _ClassVar[int]
    workflow_id: str
    code: RegisteredCode
    options_json: bytes
    scorer: RegisteredCode
    scorer_options_json: bytes
    policy_ids: _containers.RepeatedScalarFieldContainer[str]
    policy_fault_reward: float
    def __init__(self, workflow_id: _Optional[str] = ..., code: _Optional[_Union[RegisteredCode, _Mapping]] = ..., options_json: _Optional[bytes] = ..., scorer: _Optional[_Union[RegisteredCode, _Mapping]] = ..., scorer_options_json: _Optional[bytes] = ..., policy_ids: _Optional[_Iterable[str]] = ..., policy_fault_reward: _Optional[float] = ...) -> None: ...

class RegisteredCode(_message.Message):
    __slots__ = ("name", "code_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    code_digest: bytes
    def __init__(self, name: _Optional[str] = ..., code_digest: _Optional[bytes] = ...) -> None: ...
