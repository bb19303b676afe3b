import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.weights.v1 import version_pb2 as _version_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListVersionsRequest(_message.Message):
    __slots__ = ("policy_id",)
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    def __init__(self, policy_id: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_version_pb2.VersionInfo]
    def __init__(self, versions: _Optional[_Iterable[_Union[_version_pb2.VersionInfo, _Mapping]]] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("policy_id", "after_version")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    after_version: int
    def __init__(self, policy_id: _Optional[str] = ..., after_version: _Optional[int] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _version_pb2.VersionInfo
    def __init__(self, version: _Optional[_Union[_version_pb2.VersionInfo, _Mapping]] = ...) -> None: ...

class ListSourcesRequest(_message.Message):
    __slots__ = ("policy_id", "version")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ListSourcesResponse(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[_version_pb2.Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[_version_pb2.Source, _Mapping]]] = ...) -> None: ...

class ReportVersionRequest(_message.Message):
    __slots__ = ("policy_id", "version", "state", "failure", "base_version", "pull_duration", "pause_duration", "pulled_nbytes", "reports", "verify_duration", "decode_duration", "stage_duration")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PULL_DURATION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_DURATION_FIELD_NUMBER: _ClassVar[int]
    PULLED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_DURATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_DURATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    state: _version_pb2.VersionState
    failure: _failure_pb2.Failure
    base_version: int
    pull_duration: _duration_pb2.Duration
    pause_duration: _duration_pb2.Duration
    pulled_nbytes: int
    reports: _containers.RepeatedCompositeFieldContainer[_version_pb2.SourceReport]
    verify_duration: _duration_pb2.Duration
    decode_duration: _duration_pb2.Duration
    stage_duration: _duration_pb2.Duration
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[_version_pb2.VersionState, str]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., base_version: _Optional[int] = ..., pull_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pause_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pulled_nbytes: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[_version_pb2.SourceReport, _Mapping]]] = ..., verify_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stage_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReportVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestPublishRequest(_message.Message):
    __slots__ = ("policy_id",)
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    def __init__(self, policy_id: _Optional[str] = ...) -> None: ...

class RequestPublishResponse(_message.Message):
    __slots__ = ("pending", "newest_version")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    pending: bool
    newest_version: int
    def __init__(self, pending: _Optional[bool] = ..., newest_version: _Optional[int] = ...) -> None: ...
