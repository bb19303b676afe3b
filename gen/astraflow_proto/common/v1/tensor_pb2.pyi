from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_BOOL: _ClassVar[Dtype]
    DTYPE_I8: _ClassVar[Dtype]
    DTYPE_U8: _ClassVar[Dtype]
    DTYPE_I16: _ClassVar[Dtype]
    DTYPE_U16: _ClassVar[Dtype]
    DTYPE_I32: _ClassVar[Dtype]
    DTYPE_U32: _ClassVar[Dtype]
    DTYPE_I64: _ClassVar[Dtype]
    DTYPE_U64: _ClassVar[Dtype]
    DTYPE_F16: _ClassVar[Dtype]
    DTYPE_BF16: _ClassVar[Dtype]
    DTYPE_F32: _ClassVar[Dtype]
    DTYPE_F64: _ClassVar[Dtype]
    DTYPE_F8_E4M3: _ClassVar[Dtype]
    DTYPE_F8_E5M2: _ClassVar[Dtype]
DTYPE_UNSPECIFIED: Dtype
DTYPE_BOOL: Dtype
DTYPE_I8: Dtype
DTYPE_U8: Dtype
DTYPE_I16: Dtype
DTYPE_U16: Dtype
DTYPE_I32: Dtype
DTYPE_U32: Dtype
DTYPE_I64: Dtype
DTYPE_U64: Dtype
DTYPE_F16: Dtype
DTYPE_BF16: Dtype
DTYPE_F32: Dtype
DTYPE_F64: Dtype
DTYPE_F8_E4M3: Dtype
DTYPE_F8_E5M2: Dtype

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...
