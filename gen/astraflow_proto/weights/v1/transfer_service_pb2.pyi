from astraflow_proto.weights.v1 import layout_pb2 as _layout_pb2
from astraflow_proto.weights.v1 import patch_pb2 as _patch_pb2
from astraflow_proto.weights.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _transfer_pb2.TransferSpec
    def __init__(self, spec: _Optional[_Union[_transfer_pb2.TransferSpec, _Mapping]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("plan", "chunk", "waiting")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    plan: _transfer_pb2.TransferPlan
    chunk: _patch_pb2.Chunk
    waiting: Waiting
    def __init__(self, plan: _Optional[_Union[_transfer_pb2.TransferPlan, _Mapping]] = ..., chunk: _Optional[_Union[_patch_pb2.Chunk, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLanesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLanesResponse(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.LaneEndpoint]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[_transfer_pb2.LaneEndpoint, _Mapping]]] = ...) -> None: ...

class GetLayoutRequest(_message.Message):
    __slots__ = ("layout_digest",)
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layout_digest: bytes
    def __init__(self, layout_digest: _Optional[bytes] = ...) -> None: ...

class GetLayoutResponse(_message.Message):
    __slots__ = ("layout",)
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    layout: _layout_pb2.Layout
    def __init__(self, layout: _Optional[_Union[_layout_pb2.Layout, _Mapping]] = ...) -> None: ...
