from astraflow_proto.common.v1 import tensor_pb2 as _tensor_pb2
from astraflow_proto.rollout.v1 import column_pb2 as _column_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PayloadStore(_message.Message):
    __slots__ = ("url", "above_nbytes")
    URL_FIELD_NUMBER: _ClassVar[int]
    ABOVE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    url: str
    above_nbytes: int
    def __init__(self, url: _Optional[str] = ..., above_nbytes: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("name", "digest", "nbytes", "token_count", "columns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    nbytes: int
    token_count: int
    columns: _containers.RepeatedCompositeFieldContainer[PayloadColumn]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., nbytes: _Optional[int] = ..., token_count: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[PayloadColumn, _Mapping]]] = ...) -> None: ...

class PayloadColumn(_message.Message):
    __slots__ = ("name", "axis", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    axis: _column_pb2.ColumnAxis
    dtype: _tensor_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., axis: _Optional[_Union[_column_pb2.ColumnAxis, str]] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TrajectoryArrays(_message.Message):
    __slots__ = ("tokens", "sampled_mask", "logprobs", "columns")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _column_pb2.Column
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_column_pb2.Column, _Mapping]] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    tokens: _tensor_pb2.Tensor
    sampled_mask: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    columns: _containers.MessageMap[str, _column_pb2.Column]
    def __init__(self, tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampled_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., columns: _Optional[_Mapping[str, _column_pb2.Column]] = ...) -> None: ...
