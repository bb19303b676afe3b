import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.rollout.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_SCORED: _ClassVar[Outcome]
    OUTCOME_TRUNCATED: _ClassVar[Outcome]
    OUTCOME_POLICY_FAULT: _ClassVar[Outcome]
    OUTCOME_SCORER_FAILED: _ClassVar[Outcome]
    OUTCOME_INFRA_ERROR: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_RETURNED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_SCORED: Outcome
OUTCOME_TRUNCATED: Outcome
OUTCOME_POLICY_FAULT: Outcome
OUTCOME_SCORER_FAILED: Outcome
OUTCOME_INFRA_ERROR: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_RETURNED: Outcome

class Rollout(_message.Message):
    __slots__ = ("rollout_id", "task_id", "group_id", "sample_index", "outcome", "reward", "reward_parts", "failure", "reward_code_digest", "trajectories", "policy_versions", "metrics", "start_time", "finish_time", "traceparent")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PolicyVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REWARD_CODE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    failure: _failure_pb2.Failure
    reward_code_digest: bytes
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    policy_versions: _containers.ScalarMap[str, int]
    metrics: _containers.ScalarMap[str, float]
    start_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    traceparent: str
    def __init__(self, rollout_id: _Optional[str] = ..., task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., reward_code_digest: _Optional[bytes] = ..., trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ..., policy_versions: _Optional[_Mapping[str, int]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TaskResult(_message.Message):
    __slots__ = ("task_id", "rollout_count", "failures")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    rollout_count: int
    failures: _containers.RepeatedCompositeFieldContainer[SampleFailure]
    def __init__(self, task_id: _Optional[str] = ..., rollout_count: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[SampleFailure, _Mapping]]] = ...) -> None: ...

class SampleFailure(_message.Message):
    __slots__ = ("sample_index", "failure")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    failure: _failure_pb2.Failure
    def __init__(self, sample_index: _Optional[int] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...
