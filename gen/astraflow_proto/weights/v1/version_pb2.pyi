import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.weights.v1 import patch_pb2 as _patch_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SourceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_KIND_UNSPECIFIED: _ClassVar[SourceKind]
    SOURCE_KIND_ORIGIN: _ClassVar[SourceKind]
    SOURCE_KIND_RELAY: _ClassVar[SourceKind]
    SOURCE_KIND_OBJECT_STORE: _ClassVar[SourceKind]

class SourceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_STATE_UNSPECIFIED: _ClassVar[SourceState]
    SOURCE_STATE_PULLING: _ClassVar[SourceState]
    SOURCE_STATE_LIVE: _ClassVar[SourceState]

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_PULLING: _ClassVar[VersionState]
    VERSION_STATE_STAGED: _ClassVar[VersionState]
    VERSION_STATE_LIVE: _ClassVar[VersionState]
    VERSION_STATE_FAILED: _ClassVar[VersionState]
    VERSION_STATE_EVICTED: _ClassVar[VersionState]
SOURCE_KIND_UNSPECIFIED: SourceKind
SOURCE_KIND_ORIGIN: SourceKind
SOURCE_KIND_RELAY: SourceKind
SOURCE_KIND_OBJECT_STORE: SourceKind
SOURCE_STATE_UNSPECIFIED: SourceState
SOURCE_STATE_PULLING: SourceState
SOURCE_STATE_LIVE: SourceState
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_PULLING: VersionState
VERSION_STATE_STAGED: VersionState
VERSION_STATE_LIVE: VersionState
VERSION_STATE_FAILED: VersionState
VERSION_STATE_EVICTED: VersionState

class VersionInfo(_message.Message):
    __slots__ = ("policy_id", "version", "layout_digest", "content_digest", "scrub_digest", "restored_from", "step", "patches", "sources", "publish_time", "signing_key")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCRUB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    layout_digest: bytes
    content_digest: bytes
    scrub_digest: bytes
    restored_from: int
    step: int
    patches: _containers.RepeatedCompositeFieldContainer[_patch_pb2.PatchInfo]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    publish_time: _timestamp_pb2.Timestamp
    signing_key: bytes
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., content_digest: _Optional[bytes] = ..., scrub_digest: _Optional[bytes] = ..., restored_from: _Optional[int] = ..., step: _Optional[int] = ..., patches: _Optional[_Iterable[_Union[_patch_pb2.PatchInfo, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., publish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., signing_key: _Optional[bytes] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("kind", "state", "endpoint", "uri", "member_id", "region", "shard_rank", "shard_count", "goodput_bytes_per_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    kind: SourceKind
    state: SourceState
    endpoint: str
    uri: str
    member_id: str
    region: str
    shard_rank: int
    shard_count: int
    goodput_bytes_per_s: float
    def __init__(self, kind: _Optional[_Union[SourceKind, str]] = ..., state: _Optional[_Union[SourceState, str]] = ..., endpoint: _Optional[str] = ..., uri: _Optional[str] = ..., member_id: _Optional[str] = ..., region: _Optional[str] = ..., shard_rank: _Optional[int] = ..., shard_count: _Optional[int] = ..., goodput_bytes_per_s: _Optional[float] = ...) -> None: ...

class WeightEndpoint(_message.Message):
    __slots__ = ("rank", "endpoint")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    endpoint: str
    def __init__(self, rank: _Optional[int] = ..., endpoint: _Optional[str] = ...) -> None: ...

class SourceReport(_message.Message):
    __slots__ = ("address", "nbytes", "duration", "failure", "bad_chunk_count")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BAD_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    address: str
    nbytes: int
    duration: _duration_pb2.Duration
    failure: _failure_pb2.Failure
    bad_chunk_count: int
    def __init__(self, address: _Optional[str] = ..., nbytes: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., bad_chunk_count: _Optional[int] = ...) -> None: ...
