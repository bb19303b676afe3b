import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_ACTION_UNSPECIFIED: _ClassVar[ScaleAction]
    SCALE_ACTION_HOLD: _ClassVar[ScaleAction]
    SCALE_ACTION_GROW: _ClassVar[ScaleAction]
    SCALE_ACTION_SHRINK: _ClassVar[ScaleAction]
SCALE_ACTION_UNSPECIFIED: ScaleAction
SCALE_ACTION_HOLD: ScaleAction
SCALE_ACTION_GROW: ScaleAction
SCALE_ACTION_SHRINK: ScaleAction

class ScaleAdvice(_message.Message):
    __slots__ = ("action", "accelerator_count", "target_accelerator_count", "member_count", "target_member_count", "wait_fraction", "produced_count", "entered_count", "consumed_count", "stale_count", "members", "message", "window", "cooldown_time", "policies", "busy_fraction")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_ACCELERATOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENTERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    STALE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    COOLDOWN_TIME_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    action: ScaleAction
    accelerator_count: int
    target_accelerator_count: int
    member_count: int
    target_member_count: int
    wait_fraction: float
    produced_count: int
    entered_count: int
    consumed_count: int
    stale_count: int
    members: _containers.RepeatedCompositeFieldContainer[MemberAdvice]
    message: str
    window: _duration_pb2.Duration
    cooldown_time: _timestamp_pb2.Timestamp
    policies: _containers.RepeatedCompositeFieldContainer[PolicyAdvice]
    busy_fraction: float
    def __init__(self, action: _Optional[_Union[ScaleAction, str]] = ..., accelerator_count: _Optional[int] = ..., target_accelerator_count: _Optional[int] = ..., member_count: _Optional[int] = ..., target_member_count: _Optional[int] = ..., wait_fraction: _Optional[float] = ..., produced_count: _Optional[int] = ..., entered_count: _Optional[int] = ..., consumed_count: _Optional[int] = ..., stale_count: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberAdvice, _Mapping]]] = ..., message: _Optional[str] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cooldown_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., policies: _Optional[_Iterable[_Union[PolicyAdvice, _Mapping]]] = ..., busy_fraction: _Optional[float] = ...) -> None: ...

class PolicyAdvice(_message.Message):
    __slots__ = ("policy_id", "wait_fraction", "produced_count", "entered_count", "consumed_count", "stale_count")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENTERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    STALE_COUNT_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    wait_fraction: float
    produced_count: int
    entered_count: int
    consumed_count: int
    stale_count: int
    def __init__(self, policy_id: _Optional[str] = ..., wait_fraction: _Optional[float] = ..., produced_count: _Optional[int] = ..., entered_count: _Optional[int] = ..., consumed_count: _Optional[int] = ..., stale_count: _Optional[int] = ...) -> None: ...

class MemberAdvice(_message.Message):
    __slots__ = ("member_id", "accelerator_count", "produced_count", "accepted_count", "tokens_per_s", "price_per_hour", "inflight_count", "retire", "name", "live")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    accelerator_count: int
    produced_count: int
    accepted_count: int
    tokens_per_s: float
    price_per_hour: float
    inflight_count: int
    retire: bool
    name: str
    live: bool
    def __init__(self, member_id: _Optional[str] = ..., accelerator_count: _Optional[int] = ..., produced_count: _Optional[int] = ..., accepted_count: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., price_per_hour: _Optional[float] = ..., inflight_count: _Optional[int] = ..., retire: _Optional[bool] = ..., name: _Optional[str] = ..., live: _Optional[bool] = ...) -> None: ...
