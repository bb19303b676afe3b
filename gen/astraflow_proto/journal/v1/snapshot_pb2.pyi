from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Snapshot(_message.Message):
    __slots__ = ("position", "software", "nodes", "shapes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    position: int
    software: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    shapes: _containers.RepeatedCompositeFieldContainer[Shape]
    def __init__(self, position: _Optional[int] = ..., software: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., shapes: _Optional[_Iterable[_Union[Shape, _Mapping]]] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("kind", "names")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("shape", "values")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    shape: int
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, shape: _Optional[int] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("none", "truth", "whole", "real", "text", "data", "node")
    NONE_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    none: bool
    truth: bool
    whole: int
    real: float
    text: str
    data: bytes
    node: int
    def __init__(self, none: _Optional[bool] = ..., truth: _Optional[bool] = ..., whole: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., data: _Optional[bytes] = ..., node: _Optional[int] = ...) -> None: ...
