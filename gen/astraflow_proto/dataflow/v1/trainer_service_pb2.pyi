import datetime

from astraflow_proto.common.v1 import member_pb2 as _member_pb2
from astraflow_proto.common.v1 import model_pb2 as _model_pb2
from astraflow_proto.common.v1 import session_pb2 as _session_pb2
from astraflow_proto.dataflow.v1 import wait_pb2 as _wait_pb2
from astraflow_proto.rollout.v1 import batch_pb2 as _batch_pb2
from astraflow_proto.weights.v1 import version_pb2 as _version_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_OUTCOME_UNSPECIFIED: _ClassVar[BatchOutcome]
    BATCH_OUTCOME_CONSUMED: _ClassVar[BatchOutcome]
    BATCH_OUTCOME_RETURNED: _ClassVar[BatchOutcome]
    BATCH_OUTCOME_DISCARDED: _ClassVar[BatchOutcome]
BATCH_OUTCOME_UNSPECIFIED: BatchOutcome
BATCH_OUTCOME_CONSUMED: BatchOutcome
BATCH_OUTCOME_RETURNED: BatchOutcome
BATCH_OUTCOME_DISCARDED: BatchOutcome

class RegisterTrainerRequest(_message.Message):
    __slots__ = ("policy_id", "name", "contract", "resume", "identity", "groups_per_batch", "checkpoint_id", "last_step", "version", "weight_endpoints", "resources", "region")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    name: str
    contract: _session_pb2.Contract
    resume: _session_pb2.SessionResume
    identity: _model_pb2.ModelIdentity
    groups_per_batch: int
    checkpoint_id: str
    last_step: int
    version: int
    weight_endpoints: _containers.RepeatedCompositeFieldContainer[_version_pb2.WeightEndpoint]
    resources: _member_pb2.Resources
    region: str
    def __init__(self, policy_id: _Optional[str] = ..., name: _Optional[str] = ..., contract: _Optional[_Union[_session_pb2.Contract, _Mapping]] = ..., resume: _Optional[_Union[_session_pb2.SessionResume, _Mapping]] = ..., identity: _Optional[_Union[_model_pb2.ModelIdentity, _Mapping]] = ..., groups_per_batch: _Optional[int] = ..., checkpoint_id: _Optional[str] = ..., last_step: _Optional[int] = ..., version: _Optional[int] = ..., weight_endpoints: _Optional[_Iterable[_Union[_version_pb2.WeightEndpoint, _Mapping]]] = ..., resources: _Optional[_Union[_member_pb2.Resources, _Mapping]] = ..., region: _Optional[str] = ...) -> None: ...

class RegisterTrainerResponse(_message.Message):
    __slots__ = ("session", "run_id", "max_staleness", "next_version", "rolled_back_batch_count", "signing_seed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIGNING_SEED_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Session
    run_id: str
    max_staleness: int
    next_version: int
    rolled_back_batch_count: int
    signing_seed: bytes
    def __init__(self, session: _Optional[_Union[_session_pb2.Session, _Mapping]] = ..., run_id: _Optional[str] = ..., max_staleness: _Optional[int] = ..., next_version: _Optional[int] = ..., rolled_back_batch_count: _Optional[int] = ..., signing_seed: _Optional[bytes] = ...) -> None: ...

class StreamBatchesRequest(_message.Message):
    __slots__ = ("rank", "world_size", "max_tokens", "max_outstanding", "sources")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    max_tokens: int
    max_outstanding: int
    sources: bool
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_outstanding: _Optional[int] = ..., sources: _Optional[bool] = ...) -> None: ...

class StreamBatchesResponse(_message.Message):
    __slots__ = ("header", "part", "end_of_data", "wait_reason", "publish", "save", "directive", "doubt")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    header: _batch_pb2.BatchHeader
    part: _batch_pb2.BatchPart
    end_of_data: _batch_pb2.EndOfData
    wait_reason: _wait_pb2.WaitReason
    publish: PublishOrder
    save: SaveOrder
    directive: _session_pb2.Directive
    doubt: VersionDoubt
    def __init__(self, header: _Optional[_Union[_batch_pb2.BatchHeader, _Mapping]] = ..., part: _Optional[_Union[_batch_pb2.BatchPart, _Mapping]] = ..., end_of_data: _Optional[_Union[_batch_pb2.EndOfData, _Mapping]] = ..., wait_reason: _Optional[_Union[_wait_pb2.WaitReason, _Mapping]] = ..., publish: _Optional[_Union[PublishOrder, _Mapping]] = ..., save: _Optional[_Union[SaveOrder, _Mapping]] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ..., doubt: _Optional[_Union[VersionDoubt, _Mapping]] = ...) -> None: ...

class PublishOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionDoubt(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class SaveOrder(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class AckBatchRequest(_message.Message):
    __slots__ = ("batch_id", "rank", "outcome", "step", "checkpoint_id", "wait_duration", "train_duration", "metrics", "lost_rollout_ids")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_DURATION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOST_ROLLOUT_IDS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    rank: int
    outcome: BatchOutcome
    step: int
    checkpoint_id: str
    wait_duration: _duration_pb2.Duration
    train_duration: _duration_pb2.Duration
    metrics: _containers.ScalarMap[str, float]
    lost_rollout_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batch_id: _Optional[str] = ..., rank: _Optional[int] = ..., outcome: _Optional[_Union[BatchOutcome, str]] = ..., step: _Optional[int] = ..., checkpoint_id: _Optional[str] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., train_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., lost_rollout_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AckBatchResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: bool
    def __init__(self, settled: _Optional[bool] = ...) -> None: ...

class PublishVersionRequest(_message.Message):
    __slots__ = ("version", "checkpoint_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    version: _version_pb2.VersionInfo
    checkpoint_id: str
    def __init__(self, version: _Optional[_Union[_version_pb2.VersionInfo, _Mapping]] = ..., checkpoint_id: _Optional[str] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ("next_version",)
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    next_version: int
    def __init__(self, next_version: _Optional[int] = ...) -> None: ...
