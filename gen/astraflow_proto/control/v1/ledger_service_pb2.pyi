import datetime

from astraflow_proto.control.v1 import ledger_pb2 as _ledger_pb2
from astraflow_proto.dataflow.v1 import wait_pb2 as _wait_pb2
from astraflow_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_VIEW_UNSPECIFIED: _ClassVar[RolloutView]
    ROLLOUT_VIEW_SUMMARY: _ClassVar[RolloutView]
    ROLLOUT_VIEW_FULL: _ClassVar[RolloutView]
ROLLOUT_VIEW_UNSPECIFIED: RolloutView
ROLLOUT_VIEW_SUMMARY: RolloutView
ROLLOUT_VIEW_FULL: RolloutView

class GetLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("accounts", "server_time")
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.LedgerAccount]
    server_time: _timestamp_pb2.Timestamp
    def __init__(self, accounts: _Optional[_Iterable[_Union[_ledger_pb2.LedgerAccount, _Mapping]]] = ..., server_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("policy_id", "prompt_id", "group_id", "batch_id", "rollout_id", "member_id", "places", "outcomes", "min_reward", "max_reward", "view", "page_size", "page_token")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MAX_REWARD_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    prompt_id: str
    group_id: str
    batch_id: str
    rollout_id: str
    member_id: str
    places: _containers.RepeatedScalarFieldContainer[_ledger_pb2.RolloutPlace]
    outcomes: _containers.RepeatedScalarFieldContainer[_rollout_pb2.Outcome]
    min_reward: float
    max_reward: float
    view: RolloutView
    page_size: int
    page_token: str
    def __init__(self, policy_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., group_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., member_id: _Optional[str] = ..., places: _Optional[_Iterable[_Union[_ledger_pb2.RolloutPlace, str]]] = ..., outcomes: _Optional[_Iterable[_Union[_rollout_pb2.Outcome, str]]] = ..., min_reward: _Optional[float] = ..., max_reward: _Optional[float] = ..., view: _Optional[_Union[RolloutView, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts", "next_page_token")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.RolloutRecord]
    next_page_token: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_ledger_pb2.RolloutRecord, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters", "next_page_token")
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[_ledger_pb2.DeadLetter]
    next_page_token: str
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[_ledger_pb2.DeadLetter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequeuePromptRequest(_message.Message):
    __slots__ = ("prompt_id",)
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    def __init__(self, prompt_id: _Optional[str] = ...) -> None: ...

class RequeuePromptResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainWaitRequest(_message.Message):
    __slots__ = ("policy_id",)
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    def __init__(self, policy_id: _Optional[str] = ...) -> None: ...

class ExplainWaitResponse(_message.Message):
    __slots__ = ("reasons",)
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedCompositeFieldContainer[_wait_pb2.WaitReason]
    def __init__(self, reasons: _Optional[_Iterable[_Union[_wait_pb2.WaitReason, _Mapping]]] = ...) -> None: ...
