import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EvalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVAL_STATE_UNSPECIFIED: _ClassVar[EvalState]
    EVAL_STATE_PENDING: _ClassVar[EvalState]
    EVAL_STATE_RUNNING: _ClassVar[EvalState]
    EVAL_STATE_SUCCEEDED: _ClassVar[EvalState]
    EVAL_STATE_FAILED: _ClassVar[EvalState]
    EVAL_STATE_CANCELLED: _ClassVar[EvalState]
EVAL_STATE_UNSPECIFIED: EvalState
EVAL_STATE_PENDING: EvalState
EVAL_STATE_RUNNING: EvalState
EVAL_STATE_SUCCEEDED: EvalState
EVAL_STATE_FAILED: EvalState
EVAL_STATE_CANCELLED: EvalState

class EvalRun(_message.Message):
    __slots__ = ("eval_run_id", "suite", "versions", "state", "rollout_count", "scored_count", "missing_count", "results", "overall", "failure", "create_time", "finish_time")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCORED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    OVERALL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    suite: str
    versions: _containers.ScalarMap[str, int]
    state: EvalState
    rollout_count: int
    scored_count: int
    missing_count: int
    results: _containers.RepeatedCompositeFieldContainer[EvalResult]
    overall: EvalResult
    failure: _failure_pb2.Failure
    create_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    def __init__(self, eval_run_id: _Optional[str] = ..., suite: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., state: _Optional[_Union[EvalState, str]] = ..., rollout_count: _Optional[int] = ..., scored_count: _Optional[int] = ..., missing_count: _Optional[int] = ..., results: _Optional[_Iterable[_Union[EvalResult, _Mapping]]] = ..., overall: _Optional[_Union[EvalResult, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class EvalResult(_message.Message):
    __slots__ = ("data_set", "prompt_count", "repeats", "avg_at_k", "pass_at_k", "mean_reward", "missing_count", "metrics")
    class PassAtKEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    AVG_AT_K_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_K_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    data_set: str
    prompt_count: int
    repeats: int
    avg_at_k: float
    pass_at_k: _containers.ScalarMap[int, float]
    mean_reward: float
    missing_count: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, data_set: _Optional[str] = ..., prompt_count: _Optional[int] = ..., repeats: _Optional[int] = ..., avg_at_k: _Optional[float] = ..., pass_at_k: _Optional[_Mapping[int, float]] = ..., mean_reward: _Optional[float] = ..., missing_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class EvalSuite(_message.Message):
    __slots__ = ("suite", "data_sets", "policy_ids")
    SUITE_FIELD_NUMBER: _ClassVar[int]
    DATA_SETS_FIELD_NUMBER: _ClassVar[int]
    POLICY_IDS_FIELD_NUMBER: _ClassVar[int]
    suite: str
    data_sets: _containers.RepeatedCompositeFieldContainer[EvalDataSet]
    policy_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, suite: _Optional[str] = ..., data_sets: _Optional[_Iterable[_Union[EvalDataSet, _Mapping]]] = ..., policy_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class EvalDataSet(_message.Message):
    __slots__ = ("data_set", "workflow_id", "prompt_count", "repeats", "correct_reward")
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    CORRECT_REWARD_FIELD_NUMBER: _ClassVar[int]
    data_set: str
    workflow_id: str
    prompt_count: int
    repeats: int
    correct_reward: float
    def __init__(self, data_set: _Optional[str] = ..., workflow_id: _Optional[str] = ..., prompt_count: _Optional[int] = ..., repeats: _Optional[int] = ..., correct_reward: _Optional[float] = ...) -> None: ...
