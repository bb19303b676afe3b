import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WaitCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_CAUSE_UNSPECIFIED: _ClassVar[WaitCause]
    WAIT_CAUSE_NO_TRAINER: _ClassVar[WaitCause]
    WAIT_CAUSE_NO_RAAS: _ClassVar[WaitCause]
    WAIT_CAUSE_TOO_FEW_GROUPS: _ClassVar[WaitCause]
    WAIT_CAUSE_GROUP_INCOMPLETE: _ClassVar[WaitCause]
    WAIT_CAUSE_TASK_RUNNING: _ClassVar[WaitCause]
    WAIT_CAUSE_MEMBER_SILENT: _ClassVar[WaitCause]
    WAIT_CAUSE_NO_CREDIT: _ClassVar[WaitCause]
    WAIT_CAUSE_STALENESS_LIMIT: _ClassVar[WaitCause]
    WAIT_CAUSE_VERSION_NOT_LIVE: _ClassVar[WaitCause]
    WAIT_CAUSE_VERSION_BARRIER: _ClassVar[WaitCause]
    WAIT_CAUSE_BATCH_HELD: _ClassVar[WaitCause]
    WAIT_CAUSE_ALL_DROPPED: _ClassVar[WaitCause]
    WAIT_CAUSE_PAUSED: _ClassVar[WaitCause]
    WAIT_CAUSE_RECOVERING: _ClassVar[WaitCause]
WAIT_CAUSE_UNSPECIFIED: WaitCause
WAIT_CAUSE_NO_TRAINER: WaitCause
WAIT_CAUSE_NO_RAAS: WaitCause
WAIT_CAUSE_TOO_FEW_GROUPS: WaitCause
WAIT_CAUSE_GROUP_INCOMPLETE: WaitCause
WAIT_CAUSE_TASK_RUNNING: WaitCause
WAIT_CAUSE_MEMBER_SILENT: WaitCause
WAIT_CAUSE_NO_CREDIT: WaitCause
WAIT_CAUSE_STALENESS_LIMIT: WaitCause
WAIT_CAUSE_VERSION_NOT_LIVE: WaitCause
WAIT_CAUSE_VERSION_BARRIER: WaitCause
WAIT_CAUSE_BATCH_HELD: WaitCause
WAIT_CAUSE_ALL_DROPPED: WaitCause
WAIT_CAUSE_PAUSED: WaitCause
WAIT_CAUSE_RECOVERING: WaitCause

class WaitReason(_message.Message):
    __slots__ = ("cause", "waiter_id", "subject_id", "message", "since_time", "resolve_time")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WAITER_ID_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_TIME_FIELD_NUMBER: _ClassVar[int]
    RESOLVE_TIME_FIELD_NUMBER: _ClassVar[int]
    cause: WaitCause
    waiter_id: str
    subject_id: str
    message: str
    since_time: _timestamp_pb2.Timestamp
    resolve_time: _timestamp_pb2.Timestamp
    def __init__(self, cause: _Optional[_Union[WaitCause, str]] = ..., waiter_id: _Optional[str] = ..., subject_id: _Optional[str] = ..., message: _Optional[str] = ..., since_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., resolve_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
