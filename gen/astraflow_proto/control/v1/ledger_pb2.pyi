import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.control.v1 import run_pb2 as _run_pb2
from astraflow_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from astraflow_proto.rollout.v1 import task_pb2 as _task_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_PLACE_UNSPECIFIED: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_IN_FLIGHT: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_WAITING: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_FRESH: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_LEASED: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_TRAINED: _ClassVar[RolloutPlace]
    ROLLOUT_PLACE_DROPPED: _ClassVar[RolloutPlace]
ROLLOUT_PLACE_UNSPECIFIED: RolloutPlace
ROLLOUT_PLACE_IN_FLIGHT: RolloutPlace
ROLLOUT_PLACE_WAITING: RolloutPlace
ROLLOUT_PLACE_FRESH: RolloutPlace
ROLLOUT_PLACE_LEASED: RolloutPlace
ROLLOUT_PLACE_TRAINED: RolloutPlace
ROLLOUT_PLACE_DROPPED: RolloutPlace

class LedgerAccount(_message.Message):
    __slots__ = ("policy_id", "issued_count", "in_flight_count", "waiting_count", "fresh_count", "leased_count", "trained_count", "drops", "rolled_back_count", "reissued_count", "duplicate_count", "replayed_count", "balanced")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    FRESH_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_COUNT_FIELD_NUMBER: _ClassVar[int]
    REISSUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    issued_count: int
    in_flight_count: int
    waiting_count: int
    fresh_count: int
    leased_count: int
    trained_count: int
    drops: _containers.RepeatedCompositeFieldContainer[_run_pb2.DropCount]
    rolled_back_count: int
    reissued_count: int
    duplicate_count: int
    replayed_count: int
    balanced: bool
    def __init__(self, policy_id: _Optional[str] = ..., issued_count: _Optional[int] = ..., in_flight_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., fresh_count: _Optional[int] = ..., leased_count: _Optional[int] = ..., trained_count: _Optional[int] = ..., drops: _Optional[_Iterable[_Union[_run_pb2.DropCount, _Mapping]]] = ..., rolled_back_count: _Optional[int] = ..., reissued_count: _Optional[int] = ..., duplicate_count: _Optional[int] = ..., replayed_count: _Optional[int] = ..., balanced: _Optional[bool] = ...) -> None: ...

class RolloutRecord(_message.Message):
    __slots__ = ("rollout", "prompt_id", "member_id", "placements")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    prompt_id: str
    member_id: str
    placements: _containers.RepeatedCompositeFieldContainer[RolloutPlacement]
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., prompt_id: _Optional[str] = ..., member_id: _Optional[str] = ..., placements: _Optional[_Iterable[_Union[RolloutPlacement, _Mapping]]] = ...) -> None: ...

class RolloutPlacement(_message.Message):
    __slots__ = ("policy_id", "place", "batch_id", "step", "staleness", "use_count", "reason", "filter")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    place: RolloutPlace
    batch_id: str
    step: int
    staleness: int
    use_count: int
    reason: _failure_pb2.Reason
    filter: str
    def __init__(self, policy_id: _Optional[str] = ..., place: _Optional[_Union[RolloutPlace, str]] = ..., batch_id: _Optional[str] = ..., step: _Optional[int] = ..., staleness: _Optional[int] = ..., use_count: _Optional[int] = ..., reason: _Optional[_Union[_failure_pb2.Reason, str]] = ..., filter: _Optional[str] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("prompt", "attempt_count", "failures", "create_time")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    prompt: _task_pb2.Prompt
    attempt_count: int
    failures: _containers.RepeatedCompositeFieldContainer[_failure_pb2.Failure]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, prompt: _Optional[_Union[_task_pb2.Prompt, _Mapping]] = ..., attempt_count: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[_failure_pb2.Failure, _Mapping]]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
