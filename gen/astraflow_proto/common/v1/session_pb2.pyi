import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_RELAY: _ClassVar[Capability]
    CAPABILITY_PIN_VERSION: _ClassVar[Capability]
    CAPABILITY_CONTINUE: _ClassVar[Capability]
    CAPABILITY_ADAPTER: _ClassVar[Capability]
    CAPABILITY_ROUTED_EXPERTS: _ClassVar[Capability]
    CAPABILITY_BLOBS: _ClassVar[Capability]
    CAPABILITY_OBJECT_STORE: _ClassVar[Capability]
    CAPABILITY_PAYLOADS: _ClassVar[Capability]

class DirectiveKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTIVE_KIND_UNSPECIFIED: _ClassVar[DirectiveKind]
    DIRECTIVE_KIND_CONTINUE: _ClassVar[DirectiveKind]
    DIRECTIVE_KIND_DRAIN: _ClassVar[DirectiveKind]
    DIRECTIVE_KIND_STOP: _ClassVar[DirectiveKind]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_RELAY: Capability
CAPABILITY_PIN_VERSION: Capability
CAPABILITY_CONTINUE: Capability
CAPABILITY_ADAPTER: Capability
CAPABILITY_ROUTED_EXPERTS: Capability
CAPABILITY_BLOBS: Capability
CAPABILITY_OBJECT_STORE: Capability
CAPABILITY_PAYLOADS: Capability
DIRECTIVE_KIND_UNSPECIFIED: DirectiveKind
DIRECTIVE_KIND_CONTINUE: DirectiveKind
DIRECTIVE_KIND_DRAIN: DirectiveKind
DIRECTIVE_KIND_STOP: DirectiveKind

class Session(_message.Message):
    __slots__ = ("member_id", "token", "ttl", "keep_alive_interval", "transfer_token", "max_message_nbytes", "held_task_ids", "held_batch_ids")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    token: bytes
    ttl: _duration_pb2.Duration
    keep_alive_interval: _duration_pb2.Duration
    transfer_token: bytes
    max_message_nbytes: int
    held_task_ids: _containers.RepeatedScalarFieldContainer[str]
    held_batch_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member_id: _Optional[str] = ..., token: _Optional[bytes] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_alive_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., transfer_token: _Optional[bytes] = ..., max_message_nbytes: _Optional[int] = ..., held_task_ids: _Optional[_Iterable[str]] = ..., held_batch_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionResume(_message.Message):
    __slots__ = ("resume_token", "incarnation", "held_task_ids", "held_batch_ids")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    resume_token: bytes
    incarnation: int
    held_task_ids: _containers.RepeatedScalarFieldContainer[str]
    held_batch_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resume_token: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., held_task_ids: _Optional[_Iterable[str]] = ..., held_batch_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("contract_version", "capabilities", "software")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    software: str
    def __init__(self, contract_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., software: _Optional[str] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("kind", "grace", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: DirectiveKind
    grace: _duration_pb2.Duration
    message: str
    def __init__(self, kind: _Optional[_Union[DirectiveKind, str]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...
