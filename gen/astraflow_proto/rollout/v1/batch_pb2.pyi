from astraflow_proto.common.v1 import tensor_pb2 as _tensor_pb2
from astraflow_proto.rollout.v1 import column_pb2 as _column_pb2
from astraflow_proto.rollout.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_CAUSE_UNSPECIFIED: _ClassVar[EndCause]
    END_CAUSE_SOURCE_EXHAUSTED: _ClassVar[EndCause]
    END_CAUSE_STEP_LIMIT: _ClassVar[EndCause]
    END_CAUSE_STOPPED: _ClassVar[EndCause]
END_CAUSE_UNSPECIFIED: EndCause
END_CAUSE_SOURCE_EXHAUSTED: EndCause
END_CAUSE_STEP_LIMIT: EndCause
END_CAUSE_STOPPED: EndCause

class BatchHeader(_message.Message):
    __slots__ = ("batch_id", "policy_id", "version", "rank", "world_size", "part_count", "row_count", "token_count", "loss_token_count", "groups", "policy_ids", "delivery_count", "metrics", "payload_url")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_IDS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_URL_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    policy_id: str
    version: int
    rank: int
    world_size: int
    part_count: int
    row_count: int
    token_count: int
    loss_token_count: int
    groups: _containers.RepeatedCompositeFieldContainer[BatchGroup]
    policy_ids: _containers.RepeatedScalarFieldContainer[str]
    delivery_count: int
    metrics: _containers.ScalarMap[str, float]
    payload_url: str
    def __init__(self, batch_id: _Optional[str] = ..., policy_id: _Optional[str] = ..., version: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., part_count: _Optional[int] = ..., row_count: _Optional[int] = ..., token_count: _Optional[int] = ..., loss_token_count: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BatchGroup, _Mapping]]] = ..., policy_ids: _Optional[_Iterable[str]] = ..., delivery_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., payload_url: _Optional[str] = ...) -> None: ...

class BatchGroup(_message.Message):
    __slots__ = ("group_id", "prompt_id", "data_set", "epoch", "sample_count", "traceparent")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_id: str
    data_set: str
    epoch: int
    sample_count: int
    traceparent: str
    def __init__(self, group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., data_set: _Optional[str] = ..., epoch: _Optional[int] = ..., sample_count: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class BatchPart(_message.Message):
    __slots__ = ("batch_id", "index", "row_offsets", "trajectory_ids", "rollout_ids", "columns", "sources")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _column_pb2.Column
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_column_pb2.Column, _Mapping]] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    index: int
    row_offsets: _tensor_pb2.Tensor
    trajectory_ids: _containers.RepeatedScalarFieldContainer[str]
    rollout_ids: _containers.RepeatedScalarFieldContainer[str]
    columns: _containers.MessageMap[str, _column_pb2.Column]
    sources: _containers.RepeatedCompositeFieldContainer[RowSource]
    def __init__(self, batch_id: _Optional[str] = ..., index: _Optional[int] = ..., row_offsets: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., trajectory_ids: _Optional[_Iterable[str]] = ..., rollout_ids: _Optional[_Iterable[str]] = ..., columns: _Optional[_Mapping[str, _column_pb2.Column]] = ..., sources: _Optional[_Iterable[_Union[RowSource, _Mapping]]] = ...) -> None: ...

class RowSource(_message.Message):
    __slots__ = ("trajectory", "advantage", "masked", "loss_weight")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    trajectory: _trajectory_pb2.Trajectory
    advantage: float
    masked: bool
    loss_weight: float
    def __init__(self, trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., advantage: _Optional[float] = ..., masked: _Optional[bool] = ..., loss_weight: _Optional[float] = ...) -> None: ...

class EndOfData(_message.Message):
    __slots__ = ("cause", "batch_count")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    cause: EndCause
    batch_count: int
    def __init__(self, cause: _Optional[_Union[EndCause, str]] = ..., batch_count: _Optional[int] = ...) -> None: ...
