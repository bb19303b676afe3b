from astraflow_proto.weights.v1 import patch_pb2 as _patch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_GRPC: _ClassVar[Lane]
    LANE_TCP: _ClassVar[Lane]
    LANE_UCX: _ClassVar[Lane]
    LANE_SHM: _ClassVar[Lane]
    LANE_OBJECT_STORE: _ClassVar[Lane]
LANE_UNSPECIFIED: Lane
LANE_GRPC: Lane
LANE_TCP: Lane
LANE_UCX: Lane
LANE_SHM: Lane
LANE_OBJECT_STORE: Lane

class TransferSpec(_message.Message):
    __slots__ = ("policy_id", "version", "base_version", "layout_digest", "profiles", "goodput_bytes_per_s", "core_count", "max_memory_nbytes", "want_chunks", "have_chunks", "ahead", "decode_rates")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    WANT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HAVE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_RATES_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    base_version: int
    layout_digest: bytes
    profiles: _containers.RepeatedScalarFieldContainer[_patch_pb2.CodecProfile]
    goodput_bytes_per_s: float
    core_count: int
    max_memory_nbytes: int
    want_chunks: _containers.RepeatedCompositeFieldContainer[ChunkSet]
    have_chunks: _containers.RepeatedCompositeFieldContainer[ChunkSet]
    ahead: bool
    decode_rates: _containers.RepeatedCompositeFieldContainer[DecodeRate]
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., profiles: _Optional[_Iterable[_Union[_patch_pb2.CodecProfile, str]]] = ..., goodput_bytes_per_s: _Optional[float] = ..., core_count: _Optional[int] = ..., max_memory_nbytes: _Optional[int] = ..., want_chunks: _Optional[_Iterable[_Union[ChunkSet, _Mapping]]] = ..., have_chunks: _Optional[_Iterable[_Union[ChunkSet, _Mapping]]] = ..., ahead: _Optional[bool] = ..., decode_rates: _Optional[_Iterable[_Union[DecodeRate, _Mapping]]] = ...) -> None: ...

class DecodeRate(_message.Message):
    __slots__ = ("profile", "model_bytes_per_s", "payload_bytes_per_s", "whole_bytes_per_s")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MODEL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    profile: _patch_pb2.CodecProfile
    model_bytes_per_s: float
    payload_bytes_per_s: float
    whole_bytes_per_s: float
    def __init__(self, profile: _Optional[_Union[_patch_pb2.CodecProfile, str]] = ..., model_bytes_per_s: _Optional[float] = ..., payload_bytes_per_s: _Optional[float] = ..., whole_bytes_per_s: _Optional[float] = ...) -> None: ...

class ChunkSet(_message.Message):
    __slots__ = ("root_digest", "indexes")
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    root_digest: bytes
    indexes: _containers.RepeatedCompositeFieldContainer[IndexRange]
    def __init__(self, root_digest: _Optional[bytes] = ..., indexes: _Optional[_Iterable[_Union[IndexRange, _Mapping]]] = ...) -> None: ...

class IndexRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class TransferPlan(_message.Message):
    __slots__ = ("patches", "chunk_count", "payload_nbytes")
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    patches: _containers.RepeatedCompositeFieldContainer[_patch_pb2.PatchIndex]
    chunk_count: int
    payload_nbytes: int
    def __init__(self, patches: _Optional[_Iterable[_Union[_patch_pb2.PatchIndex, _Mapping]]] = ..., chunk_count: _Optional[int] = ..., payload_nbytes: _Optional[int] = ...) -> None: ...

class LaneEndpoint(_message.Message):
    __slots__ = ("lane", "address")
    LANE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    address: str
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., address: _Optional[str] = ...) -> None: ...
