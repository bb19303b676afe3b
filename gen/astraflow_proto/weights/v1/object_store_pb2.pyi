from astraflow_proto.weights.v1 import patch_pb2 as _patch_pb2
from astraflow_proto.weights.v1 import version_pb2 as _version_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionManifest(_message.Message):
    __slots__ = ("version", "patches", "reachable")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    version: _version_pb2.VersionInfo
    patches: _containers.RepeatedCompositeFieldContainer[PatchObject]
    reachable: _containers.RepeatedCompositeFieldContainer[_patch_pb2.PatchInfo]
    def __init__(self, version: _Optional[_Union[_version_pb2.VersionInfo, _Mapping]] = ..., patches: _Optional[_Iterable[_Union[PatchObject, _Mapping]]] = ..., reachable: _Optional[_Iterable[_Union[_patch_pb2.PatchInfo, _Mapping]]] = ...) -> None: ...

class PatchObject(_message.Message):
    __slots__ = ("index", "headers")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    index: _patch_pb2.PatchIndex
    headers: _containers.RepeatedCompositeFieldContainer[_patch_pb2.ChunkHeader]
    def __init__(self, index: _Optional[_Union[_patch_pb2.PatchIndex, _Mapping]] = ..., headers: _Optional[_Iterable[_Union[_patch_pb2.ChunkHeader, _Mapping]]] = ...) -> None: ...
