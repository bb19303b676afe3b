import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.common.v1 import member_pb2 as _member_pb2
from astraflow_proto.common.v1 import session_pb2 as _session_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeepAliveRequest(_message.Message):
    __slots__ = ("raas", "trainer")
    RAAS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    raas: _member_pb2.RaasLoad
    trainer: _member_pb2.TrainerLoad
    def __init__(self, raas: _Optional[_Union[_member_pb2.RaasLoad, _Mapping]] = ..., trainer: _Optional[_Union[_member_pb2.TrainerLoad, _Mapping]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("ttl", "directive", "server_time", "transfer_token")
    TTL_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    directive: _session_pb2.Directive
    server_time: _timestamp_pb2.Timestamp
    transfer_token: bytes
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ..., server_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., transfer_token: _Optional[bytes] = ...) -> None: ...

class ReportFailureRequest(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _failure_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class ReportFailureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
