from astraflow_proto.common.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CodecProfile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_PROFILE_UNSPECIFIED: _ClassVar[CodecProfile]
    CODEC_PROFILE_FAST: _ClassVar[CodecProfile]
    CODEC_PROFILE_COMPACT: _ClassVar[CodecProfile]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_UNCHANGED: _ClassVar[Encoding]
    ENCODING_DENSE: _ClassVar[Encoding]
    ENCODING_DENSE_PLANES: _ClassVar[Encoding]
    ENCODING_SPARSE_FAST: _ClassVar[Encoding]
    ENCODING_SPARSE_COMPACT: _ClassVar[Encoding]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]
CODEC_PROFILE_UNSPECIFIED: CodecProfile
CODEC_PROFILE_FAST: CodecProfile
CODEC_PROFILE_COMPACT: CodecProfile
ENCODING_UNSPECIFIED: Encoding
ENCODING_UNCHANGED: Encoding
ENCODING_DENSE: Encoding
ENCODING_DENSE_PLANES: Encoding
ENCODING_SPARSE_FAST: Encoding
ENCODING_SPARSE_COMPACT: Encoding
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_ZSTD: Compression

class PatchInfo(_message.Message):
    __slots__ = ("base_version", "version", "profile", "codec_version", "root_digest", "chunk_count", "payload_nbytes", "shard_rank", "shard_count", "signature")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    version: int
    profile: CodecProfile
    codec_version: int
    root_digest: bytes
    chunk_count: int
    payload_nbytes: int
    shard_rank: int
    shard_count: int
    signature: bytes
    def __init__(self, base_version: _Optional[int] = ..., version: _Optional[int] = ..., profile: _Optional[_Union[CodecProfile, str]] = ..., codec_version: _Optional[int] = ..., root_digest: _Optional[bytes] = ..., chunk_count: _Optional[int] = ..., payload_nbytes: _Optional[int] = ..., shard_rank: _Optional[int] = ..., shard_count: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PatchIndex(_message.Message):
    __slots__ = ("patch", "chunk_digests", "shared_tables")
    PATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TABLES_FIELD_NUMBER: _ClassVar[int]
    patch: PatchInfo
    chunk_digests: _containers.RepeatedScalarFieldContainer[bytes]
    shared_tables: bytes
    def __init__(self, patch: _Optional[_Union[PatchInfo, _Mapping]] = ..., chunk_digests: _Optional[_Iterable[bytes]] = ..., shared_tables: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("header", "payload", "patch_index")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    header: ChunkHeader
    payload: bytes
    patch_index: int
    def __init__(self, header: _Optional[_Union[ChunkHeader, _Mapping]] = ..., payload: _Optional[bytes] = ..., patch_index: _Optional[int] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("index", "offset", "nbytes", "dtype", "encoding", "compression", "payload_nbytes", "changed_count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    nbytes: int
    dtype: _tensor_pb2.Dtype
    encoding: Encoding
    compression: Compression
    payload_nbytes: int
    changed_count: int
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., compression: _Optional[_Union[Compression, str]] = ..., payload_nbytes: _Optional[int] = ..., changed_count: _Optional[int] = ...) -> None: ...
