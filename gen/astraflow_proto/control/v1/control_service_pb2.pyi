import datetime

from astraflow_proto.control.v1 import run_pb2 as _run_pb2
from astraflow_proto.control.v1 import scale_pb2 as _scale_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_MODE_UNSPECIFIED: _ClassVar[StopMode]
    STOP_MODE_DRAIN: _ClassVar[StopMode]
    STOP_MODE_CANCEL: _ClassVar[StopMode]
STOP_MODE_UNSPECIFIED: StopMode
STOP_MODE_DRAIN: StopMode
STOP_MODE_CANCEL: StopMode

class GetRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: _run_pb2.Run
    def __init__(self, run: _Optional[_Union[_run_pb2.Run, _Mapping]] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("min_interval",)
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    min_interval: _duration_pb2.Duration
    def __init__(self, min_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: _run_pb2.Run
    def __init__(self, run: _Optional[_Union[_run_pb2.Run, _Mapping]] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainMemberRequest(_message.Message):
    __slots__ = ("member_id", "grace")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    grace: _duration_pb2.Duration
    def __init__(self, member_id: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainMemberResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ("member_ids",)
    MEMBER_IDS_FIELD_NUMBER: _ClassVar[int]
    member_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveRunRequest(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class SaveRunResponse(_message.Message):
    __slots__ = ("path", "policies", "save_time", "drawn_counts")
    class DrawnCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAWN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    policies: _containers.RepeatedCompositeFieldContainer[PolicyCheckpoint]
    save_time: _timestamp_pb2.Timestamp
    drawn_counts: _containers.ScalarMap[str, int]
    def __init__(self, path: _Optional[str] = ..., policies: _Optional[_Iterable[_Union[PolicyCheckpoint, _Mapping]]] = ..., save_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., drawn_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PolicyCheckpoint(_message.Message):
    __slots__ = ("policy_id", "step", "version", "fresh_group_count")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FRESH_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    step: int
    version: int
    fresh_group_count: int
    def __init__(self, policy_id: _Optional[str] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., fresh_group_count: _Optional[int] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("mode", "grace")
    MODE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    mode: StopMode
    grace: _duration_pb2.Duration
    def __init__(self, mode: _Optional[_Union[StopMode, str]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScaleAdviceRequest(_message.Message):
    __slots__ = ("window",)
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    window: _duration_pb2.Duration
    def __init__(self, window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetScaleAdviceResponse(_message.Message):
    __slots__ = ("advice",)
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    advice: _scale_pb2.ScaleAdvice
    def __init__(self, advice: _Optional[_Union[_scale_pb2.ScaleAdvice, _Mapping]] = ...) -> None: ...
