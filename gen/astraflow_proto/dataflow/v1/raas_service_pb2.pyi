from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.common.v1 import member_pb2 as _member_pb2
from astraflow_proto.common.v1 import model_pb2 as _model_pb2
from astraflow_proto.common.v1 import session_pb2 as _session_pb2
from astraflow_proto.rollout.v1 import payload_pb2 as _payload_pb2
from astraflow_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from astraflow_proto.rollout.v1 import task_pb2 as _task_pb2
from astraflow_proto.weights.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_STALE: _ClassVar[CancelReason]
    CANCEL_REASON_GROUP_DONE: _ClassVar[CancelReason]
    CANCEL_REASON_EVAL_CANCELLED: _ClassVar[CancelReason]
    CANCEL_REASON_DEADLINE: _ClassVar[CancelReason]
    CANCEL_REASON_STOP: _ClassVar[CancelReason]
    CANCEL_REASON_VERSION_LOST: _ClassVar[CancelReason]

class Disposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISPOSITION_UNSPECIFIED: _ClassVar[Disposition]
    DISPOSITION_ACCEPTED: _ClassVar[Disposition]
    DISPOSITION_DUPLICATE: _ClassVar[Disposition]
    DISPOSITION_DROPPED: _ClassVar[Disposition]
    DISPOSITION_REJECTED: _ClassVar[Disposition]
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_STALE: CancelReason
CANCEL_REASON_GROUP_DONE: CancelReason
CANCEL_REASON_EVAL_CANCELLED: CancelReason
CANCEL_REASON_DEADLINE: CancelReason
CANCEL_REASON_STOP: CancelReason
CANCEL_REASON_VERSION_LOST: CancelReason
DISPOSITION_UNSPECIFIED: Disposition
DISPOSITION_ACCEPTED: Disposition
DISPOSITION_DUPLICATE: Disposition
DISPOSITION_DROPPED: Disposition
DISPOSITION_REJECTED: Disposition

class JoinPoolRequest(_message.Message):
    __slots__ = ("name", "contract", "resume", "capacity", "policies", "codes", "resources", "region", "relay_endpoint", "relay_lanes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    RELAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    RELAY_LANES_FIELD_NUMBER: _ClassVar[int]
    name: str
    contract: _session_pb2.Contract
    resume: _session_pb2.SessionResume
    capacity: int
    policies: _containers.RepeatedCompositeFieldContainer[ServedPolicy]
    codes: _containers.RepeatedCompositeFieldContainer[_task_pb2.RegisteredCode]
    resources: _member_pb2.Resources
    region: str
    relay_endpoint: str
    relay_lanes: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.LaneEndpoint]
    def __init__(self, name: _Optional[str] = ..., contract: _Optional[_Union[_session_pb2.Contract, _Mapping]] = ..., resume: _Optional[_Union[_session_pb2.SessionResume, _Mapping]] = ..., capacity: _Optional[int] = ..., policies: _Optional[_Iterable[_Union[ServedPolicy, _Mapping]]] = ..., codes: _Optional[_Iterable[_Union[_task_pb2.RegisteredCode, _Mapping]]] = ..., resources: _Optional[_Union[_member_pb2.Resources, _Mapping]] = ..., region: _Optional[str] = ..., relay_endpoint: _Optional[str] = ..., relay_lanes: _Optional[_Iterable[_Union[_transfer_pb2.LaneEndpoint, _Mapping]]] = ...) -> None: ...

class ServedPolicy(_message.Message):
    __slots__ = ("policy_id", "version", "identity", "max_context_token_count")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    version: int
    identity: _model_pb2.ModelIdentity
    max_context_token_count: int
    def __init__(self, policy_id: _Optional[str] = ..., version: _Optional[int] = ..., identity: _Optional[_Union[_model_pb2.ModelIdentity, _Mapping]] = ..., max_context_token_count: _Optional[int] = ...) -> None: ...

class JoinPoolResponse(_message.Message):
    __slots__ = ("session", "run_id", "workflows", "payload_store")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKFLOWS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_STORE_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Session
    run_id: str
    workflows: _containers.RepeatedCompositeFieldContainer[_task_pb2.Workflow]
    payload_store: _payload_pb2.PayloadStore
    def __init__(self, session: _Optional[_Union[_session_pb2.Session, _Mapping]] = ..., run_id: _Optional[str] = ..., workflows: _Optional[_Iterable[_Union[_task_pb2.Workflow, _Mapping]]] = ..., payload_store: _Optional[_Union[_payload_pb2.PayloadStore, _Mapping]] = ...) -> None: ...

class StreamTasksRequest(_message.Message):
    __slots__ = ("open", "credit", "nack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    open: TaskOpen
    credit: TaskCredit
    nack: TaskNack
    def __init__(self, open: _Optional[_Union[TaskOpen, _Mapping]] = ..., credit: _Optional[_Union[TaskCredit, _Mapping]] = ..., nack: _Optional[_Union[TaskNack, _Mapping]] = ...) -> None: ...

class TaskOpen(_message.Message):
    __slots__ = ("credit",)
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    credit: TaskCredit
    def __init__(self, credit: _Optional[_Union[TaskCredit, _Mapping]] = ...) -> None: ...

class TaskCredit(_message.Message):
    __slots__ = ("max_outstanding", "max_eval_outstanding", "max_eval_extra")
    MAX_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    MAX_EVAL_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    MAX_EVAL_EXTRA_FIELD_NUMBER: _ClassVar[int]
    max_outstanding: int
    max_eval_outstanding: int
    max_eval_extra: int
    def __init__(self, max_outstanding: _Optional[int] = ..., max_eval_outstanding: _Optional[int] = ..., max_eval_extra: _Optional[int] = ...) -> None: ...

class TaskNack(_message.Message):
    __slots__ = ("task_id", "failure")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    failure: _failure_pb2.Failure
    def __init__(self, task_id: _Optional[str] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class StreamTasksResponse(_message.Message):
    __slots__ = ("task", "cancellation", "directive")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CANCELLATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    task: _task_pb2.RolloutTask
    cancellation: TaskCancellation
    directive: _session_pb2.Directive
    def __init__(self, task: _Optional[_Union[_task_pb2.RolloutTask, _Mapping]] = ..., cancellation: _Optional[_Union[TaskCancellation, _Mapping]] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ...) -> None: ...

class TaskCancellation(_message.Message):
    __slots__ = ("task_id", "reason", "sample_indexes")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    reason: CancelReason
    sample_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task_id: _Optional[str] = ..., reason: _Optional[_Union[CancelReason, str]] = ..., sample_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamRolloutsRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[RolloutItem]
    def __init__(self, items: _Optional[_Iterable[_Union[RolloutItem, _Mapping]]] = ...) -> None: ...

class RolloutItem(_message.Message):
    __slots__ = ("rollout", "result")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    result: _rollout_pb2.TaskResult
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., result: _Optional[_Union[_rollout_pb2.TaskResult, _Mapping]] = ...) -> None: ...

class StreamRolloutsResponse(_message.Message):
    __slots__ = ("acks",)
    ACKS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[ItemAck]
    def __init__(self, acks: _Optional[_Iterable[_Union[ItemAck, _Mapping]]] = ...) -> None: ...

class ItemAck(_message.Message):
    __slots__ = ("item_id", "disposition", "reason", "message")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    disposition: Disposition
    reason: _failure_pb2.Reason
    message: str
    def __init__(self, item_id: _Optional[str] = ..., disposition: _Optional[_Union[Disposition, str]] = ..., reason: _Optional[_Union[_failure_pb2.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...
