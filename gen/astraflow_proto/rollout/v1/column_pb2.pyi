from astraflow_proto.common.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ColumnAxis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COLUMN_AXIS_UNSPECIFIED: _ClassVar[ColumnAxis]
    COLUMN_AXIS_ROW: _ClassVar[ColumnAxis]
    COLUMN_AXIS_TOKEN: _ClassVar[ColumnAxis]
COLUMN_AXIS_UNSPECIFIED: ColumnAxis
COLUMN_AXIS_ROW: ColumnAxis
COLUMN_AXIS_TOKEN: ColumnAxis

class Column(_message.Message):
    __slots__ = ("axis", "tensor")
    AXIS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    axis: ColumnAxis
    tensor: _tensor_pb2.Tensor
    def __init__(self, axis: _Optional[_Union[ColumnAxis, str]] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
