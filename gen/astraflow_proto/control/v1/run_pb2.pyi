import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.common.v1 import member_pb2 as _member_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_WAITING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_PAUSED: _ClassVar[RunState]
    RUN_STATE_SOURCE_EXHAUSTED: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
    RUN_STATE_DONE: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_JOINING: _ClassVar[MemberState]
    MEMBER_STATE_LIVE: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_SUSPECT: _ClassVar[MemberState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_WAITING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_PAUSED: RunState
RUN_STATE_SOURCE_EXHAUSTED: RunState
RUN_STATE_STOPPING: RunState
RUN_STATE_DONE: RunState
RUN_STATE_FAILED: RunState
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_JOINING: MemberState
MEMBER_STATE_LIVE: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_SUSPECT: MemberState

class Run(_message.Message):
    __slots__ = ("run_id", "state", "policies", "members", "dead_letter_count", "epochs", "failure", "start_time", "server_time", "failures")
    class EpochsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    policies: _containers.RepeatedCompositeFieldContainer[PolicyStatus]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    dead_letter_count: int
    epochs: _containers.ScalarMap[str, int]
    failure: _failure_pb2.Failure
    start_time: _timestamp_pb2.Timestamp
    server_time: _timestamp_pb2.Timestamp
    failures: Failures
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., policies: _Optional[_Iterable[_Union[PolicyStatus, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., dead_letter_count: _Optional[int] = ..., epochs: _Optional[_Mapping[str, int]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., server_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., failures: _Optional[_Union[Failures, _Mapping]] = ...) -> None: ...

class Failures(_message.Message):
    __slots__ = ("finished_count", "failed_count", "recent_count", "recent_failed_count", "causes")
    FINISHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECENT_FAILED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    finished_count: int
    failed_count: int
    recent_count: int
    recent_failed_count: int
    causes: _containers.RepeatedCompositeFieldContainer[FailureCause]
    def __init__(self, finished_count: _Optional[int] = ..., failed_count: _Optional[int] = ..., recent_count: _Optional[int] = ..., recent_failed_count: _Optional[int] = ..., causes: _Optional[_Iterable[_Union[FailureCause, _Mapping]]] = ...) -> None: ...

class FailureCause(_message.Message):
    __slots__ = ("cause", "count", "last", "first_time", "last_time")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_TIME_FIELD_NUMBER: _ClassVar[int]
    cause: str
    count: int
    last: _failure_pb2.Failure
    first_time: _timestamp_pb2.Timestamp
    last_time: _timestamp_pb2.Timestamp
    def __init__(self, cause: _Optional[str] = ..., count: _Optional[int] = ..., last: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., first_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PolicyStatus(_message.Message):
    __slots__ = ("policy_id", "version", "step", "open_group_count", "max_open_group_count", "fresh_count", "leased_count", "trained_count", "replay_count", "drops", "staleness_counts", "wait_fraction", "mean_reward", "tokens_per_s", "metrics", "window", "buffer_group_count", "buffer_nbytes", "replay_nbytes", "leased_batch_count", "filtered_group_count")
    class StalenessCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FRESH_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BUFFER_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUFFER_NBYTES_FIELD_NUMBER: _ClassVar[int]
    REPLAY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILTERED_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    step: int
    open_group_count: int
    max_open_group_count: int
    fresh_count: int
    leased_count: int
    trained_count: int
    replay_count: int
    drops: _containers.RepeatedCompositeFieldContainer[DropCount]
    staleness_counts: _containers.ScalarMap[int, int]
    wait_fraction: float
    mean_reward: float
    tokens_per_s: float
    metrics: _containers.ScalarMap[str, float]
    window: _duration_pb2.Duration
    buffer_group_count: int
    buffer_nbytes: int
    replay_nbytes: int
    leased_batch_count: int
    filtered_group_count: int
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., open_group_count: _Optional[int] = ..., max_open_group_count: _Optional[int] = ..., fresh_count: _Optional[int] = ..., leased_count: _Optional[int] = ..., trained_count: _Optional[int] = ..., replay_count: _Optional[int] = ..., drops: _Optional[_Iterable[_Union[DropCount, _Mapping]]] = ..., staleness_counts: _Optional[_Mapping[int, int]] = ..., wait_fraction: _Optional[float] = ..., mean_reward: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., buffer_group_count: _Optional[int] = ..., buffer_nbytes: _Optional[int] = ..., replay_nbytes: _Optional[int] = ..., leased_batch_count: _Optional[int] = ..., filtered_group_count: _Optional[int] = ...) -> None: ...

class DropCount(_message.Message):
    __slots__ = ("reason", "filter", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: _failure_pb2.Reason
    filter: str
    count: int
    def __init__(self, reason: _Optional[_Union[_failure_pb2.Reason, str]] = ..., filter: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("member_id", "name", "role", "state", "region", "versions", "resources", "raas", "trainer", "accepted_count", "reissued_count", "join_time", "keep_alive_time", "outstanding_count", "max_outstanding")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    RAAS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REISSUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIME_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    name: str
    role: _member_pb2.Role
    state: MemberState
    region: str
    versions: _containers.ScalarMap[str, int]
    resources: _member_pb2.Resources
    raas: _member_pb2.RaasLoad
    trainer: _member_pb2.TrainerLoad
    accepted_count: int
    reissued_count: int
    join_time: _timestamp_pb2.Timestamp
    keep_alive_time: _timestamp_pb2.Timestamp
    outstanding_count: int
    max_outstanding: int
    def __init__(self, member_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[_member_pb2.Role, str]] = ..., state: _Optional[_Union[MemberState, str]] = ..., region: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., resources: _Optional[_Union[_member_pb2.Resources, _Mapping]] = ..., raas: _Optional[_Union[_member_pb2.RaasLoad, _Mapping]] = ..., trainer: _Optional[_Union[_member_pb2.TrainerLoad, _Mapping]] = ..., accepted_count: _Optional[int] = ..., reissued_count: _Optional[int] = ..., join_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., keep_alive_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., outstanding_count: _Optional[int] = ..., max_outstanding: _Optional[int] = ...) -> None: ...
