from astraflow_proto.common.v1 import tensor_pb2 as _tensor_pb2
from astraflow_proto.rollout.v1 import column_pb2 as _column_pb2
from astraflow_proto.rollout.v1 import payload_pb2 as _payload_pb2
from astraflow_proto.rollout.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_POLICY_UNSPECIFIED: _ClassVar[KvPolicy]
    KV_POLICY_KEEP: _ClassVar[KvPolicy]
    KV_POLICY_RECOMPUTE: _ClassVar[KvPolicy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TURNS: _ClassVar[FinishReason]
    FINISH_REASON_TIMEOUT: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
KV_POLICY_UNSPECIFIED: KvPolicy
KV_POLICY_KEEP: KvPolicy
KV_POLICY_RECOMPUTE: KvPolicy
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TURNS: FinishReason
FINISH_REASON_TIMEOUT: FinishReason
FINISH_REASON_ABORT: FinishReason

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "policy_id", "agent", "tokens", "sampled_mask", "logprobs", "version_spans", "sampling", "finish_reason", "parent_trajectory_id", "branch_offset", "segment_index", "reward", "columns", "engine", "payload")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _column_pb2.Column
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_column_pb2.Column, _Mapping]] = ...) -> None: ...
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PARENT_TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    policy_id: str
    agent: str
    tokens: _tensor_pb2.Tensor
    sampled_mask: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    sampling: _sampling_pb2.SamplingParams
    finish_reason: FinishReason
    parent_trajectory_id: str
    branch_offset: int
    segment_index: int
    reward: float
    columns: _containers.MessageMap[str, _column_pb2.Column]
    engine: str
    payload: _payload_pb2.Payload
    def __init__(self, trajectory_id: _Optional[str] = ..., policy_id: _Optional[str] = ..., agent: _Optional[str] = ..., tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampled_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., parent_trajectory_id: _Optional[str] = ..., branch_offset: _Optional[int] = ..., segment_index: _Optional[int] = ..., reward: _Optional[float] = ..., columns: _Optional[_Mapping[str, _column_pb2.Column]] = ..., engine: _Optional[str] = ..., payload: _Optional[_Union[_payload_pb2.Payload, _Mapping]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "length", "kv", "policy_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    version: int
    length: int
    kv: KvPolicy
    policy_id: str
    def __init__(self, version: _Optional[int] = ..., length: _Optional[int] = ..., kv: _Optional[_Union[KvPolicy, str]] = ..., policy_id: _Optional[str] = ...) -> None: ...
