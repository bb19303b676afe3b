import datetime

from astraflow_proto.common.v1 import failure_pb2 as _failure_pb2
from astraflow_proto.common.v1 import member_pb2 as _member_pb2
from astraflow_proto.control.v1 import control_service_pb2 as _control_service_pb2
from astraflow_proto.dataflow.v1 import raas_service_pb2 as _raas_service_pb2
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as _trainer_service_pb2
from astraflow_proto.rollout.v1 import rollout_pb2 as _rollout_pb2
from astraflow_proto.rollout.v1 import task_pb2 as _task_pb2
from astraflow_proto.weights.v1 import version_pb2 as _version_pb2
from astraflow_proto.weights.v1 import version_service_pb2 as _version_service_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Record(_message.Message):
    __slots__ = ("time", "run_opened", "hub_restarted", "joined", "member_kept_alive", "session_left", "credit_given", "task_nacked", "rollout_arrived", "task_finished", "batch_stream_opened", "batch_acked", "version_published", "version_reported", "prompts_offered", "eval_prompts_offered", "eval_created", "eval_cancelled", "run_paused", "run_resumed", "member_drained", "run_stopped", "run_broken", "ticked", "publish_requested", "prompt_requeued", "rollout_repeated", "save_requested", "failure_reported", "token_revoked", "goes_on", "decision")
    TIME_FIELD_NUMBER: _ClassVar[int]
    RUN_OPENED_FIELD_NUMBER: _ClassVar[int]
    HUB_RESTARTED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_KEPT_ALIVE_FIELD_NUMBER: _ClassVar[int]
    SESSION_LEFT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_GIVEN_FIELD_NUMBER: _ClassVar[int]
    TASK_NACKED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    TASK_FINISHED_FIELD_NUMBER: _ClassVar[int]
    BATCH_STREAM_OPENED_FIELD_NUMBER: _ClassVar[int]
    BATCH_ACKED_FIELD_NUMBER: _ClassVar[int]
    VERSION_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    VERSION_REPORTED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    EVAL_PROMPTS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    EVAL_CREATED_FIELD_NUMBER: _ClassVar[int]
    EVAL_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RUN_PAUSED_FIELD_NUMBER: _ClassVar[int]
    RUN_RESUMED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_DRAINED_FIELD_NUMBER: _ClassVar[int]
    RUN_STOPPED_FIELD_NUMBER: _ClassVar[int]
    RUN_BROKEN_FIELD_NUMBER: _ClassVar[int]
    TICKED_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_REQUEUED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_REPEATED_FIELD_NUMBER: _ClassVar[int]
    SAVE_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REPORTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REVOKED_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    run_opened: RunOpened
    hub_restarted: HubRestarted
    joined: Joined
    member_kept_alive: MemberKeptAlive
    session_left: SessionLeft
    credit_given: CreditGiven
    task_nacked: TaskNacked
    rollout_arrived: RolloutArrived
    task_finished: TaskFinished
    batch_stream_opened: BatchStreamOpened
    batch_acked: BatchAcked
    version_published: VersionPublished
    version_reported: VersionReported
    prompts_offered: PromptsOffered
    eval_prompts_offered: EvalPromptsOffered
    eval_created: EvalCreated
    eval_cancelled: EvalCancelled
    run_paused: RunPaused
    run_resumed: RunResumed
    member_drained: MemberDrained
    run_stopped: RunStopped
    run_broken: RunBroken
    ticked: Ticked
    publish_requested: PublishRequested
    prompt_requeued: PromptRequeued
    rollout_repeated: RolloutRepeated
    save_requested: SaveRequested
    failure_reported: FailureReported
    token_revoked: TokenRevoked
    goes_on: bool
    decision: int
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., run_opened: _Optional[_Union[RunOpened, _Mapping]] = ..., hub_restarted: _Optional[_Union[HubRestarted, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., member_kept_alive: _Optional[_Union[MemberKeptAlive, _Mapping]] = ..., session_left: _Optional[_Union[SessionLeft, _Mapping]] = ..., credit_given: _Optional[_Union[CreditGiven, _Mapping]] = ..., task_nacked: _Optional[_Union[TaskNacked, _Mapping]] = ..., rollout_arrived: _Optional[_Union[RolloutArrived, _Mapping]] = ..., task_finished: _Optional[_Union[TaskFinished, _Mapping]] = ..., batch_stream_opened: _Optional[_Union[BatchStreamOpened, _Mapping]] = ..., batch_acked: _Optional[_Union[BatchAcked, _Mapping]] = ..., version_published: _Optional[_Union[VersionPublished, _Mapping]] = ..., version_reported: _Optional[_Union[VersionReported, _Mapping]] = ..., prompts_offered: _Optional[_Union[PromptsOffered, _Mapping]] = ..., eval_prompts_offered: _Optional[_Union[EvalPromptsOffered, _Mapping]] = ..., eval_created: _Optional[_Union[EvalCreated, _Mapping]] = ..., eval_cancelled: _Optional[_Union[EvalCancelled, _Mapping]] = ..., run_paused: _Optional[_Union[RunPaused, _Mapping]] = ..., run_resumed: _Optional[_Union[RunResumed, _Mapping]] = ..., member_drained: _Optional[_Union[MemberDrained, _Mapping]] = ..., run_stopped: _Optional[_Union[RunStopped, _Mapping]] = ..., run_broken: _Optional[_Union[RunBroken, _Mapping]] = ..., ticked: _Optional[_Union[Ticked, _Mapping]] = ..., publish_requested: _Optional[_Union[PublishRequested, _Mapping]] = ..., prompt_requeued: _Optional[_Union[PromptRequeued, _Mapping]] = ..., rollout_repeated: _Optional[_Union[RolloutRepeated, _Mapping]] = ..., save_requested: _Optional[_Union[SaveRequested, _Mapping]] = ..., failure_reported: _Optional[_Union[FailureReported, _Mapping]] = ..., token_revoked: _Optional[_Union[TokenRevoked, _Mapping]] = ..., goes_on: _Optional[bool] = ..., decision: _Optional[int] = ...) -> None: ...

class RunOpened(_message.Message):
    __slots__ = ("run_id", "settings_digest", "data_set_sizes", "software", "step_counts")
    class DataSetSizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StepCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_SIZES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    settings_digest: bytes
    data_set_sizes: _containers.ScalarMap[str, int]
    software: str
    step_counts: _containers.ScalarMap[str, int]
    def __init__(self, run_id: _Optional[str] = ..., settings_digest: _Optional[bytes] = ..., data_set_sizes: _Optional[_Mapping[str, int]] = ..., software: _Optional[str] = ..., step_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class HubRestarted(_message.Message):
    __slots__ = ("software", "step_counts")
    class StepCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    software: str
    step_counts: _containers.ScalarMap[str, int]
    def __init__(self, software: _Optional[str] = ..., step_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("raas", "trainer", "token_digest", "resumes", "token_id", "is_relay")
    RAAS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_RELAY_FIELD_NUMBER: _ClassVar[int]
    raas: _raas_service_pb2.JoinPoolRequest
    trainer: _trainer_service_pb2.RegisterTrainerRequest
    token_digest: bytes
    resumes: str
    token_id: str
    is_relay: bool
    def __init__(self, raas: _Optional[_Union[_raas_service_pb2.JoinPoolRequest, _Mapping]] = ..., trainer: _Optional[_Union[_trainer_service_pb2.RegisterTrainerRequest, _Mapping]] = ..., token_digest: _Optional[bytes] = ..., resumes: _Optional[str] = ..., token_id: _Optional[str] = ..., is_relay: _Optional[bool] = ...) -> None: ...

class TokenRevoked(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class MemberKeptAlive(_message.Message):
    __slots__ = ("member_id", "raas", "trainer")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RAAS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    raas: _member_pb2.RaasLoad
    trainer: _member_pb2.TrainerLoad
    def __init__(self, member_id: _Optional[str] = ..., raas: _Optional[_Union[_member_pb2.RaasLoad, _Mapping]] = ..., trainer: _Optional[_Union[_member_pb2.TrainerLoad, _Mapping]] = ...) -> None: ...

class SessionLeft(_message.Message):
    __slots__ = ("member_id", "message")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    message: str
    def __init__(self, member_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class FailureReported(_message.Message):
    __slots__ = ("member_id", "failure")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    failure: _failure_pb2.Failure
    def __init__(self, member_id: _Optional[str] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class CreditGiven(_message.Message):
    __slots__ = ("member_id", "credit")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    credit: _raas_service_pb2.TaskCredit
    def __init__(self, member_id: _Optional[str] = ..., credit: _Optional[_Union[_raas_service_pb2.TaskCredit, _Mapping]] = ...) -> None: ...

class TaskNacked(_message.Message):
    __slots__ = ("member_id", "task_id", "failure")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    task_id: str
    failure: _failure_pb2.Failure
    def __init__(self, member_id: _Optional[str] = ..., task_id: _Optional[str] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class RolloutArrived(_message.Message):
    __slots__ = ("member_id", "rollout")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    rollout: _rollout_pb2.Rollout
    def __init__(self, member_id: _Optional[str] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class RolloutRepeated(_message.Message):
    __slots__ = ("member_id", "rollout_id", "policy_ids")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_IDS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    rollout_id: str
    policy_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., policy_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TaskFinished(_message.Message):
    __slots__ = ("member_id", "result")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    result: _rollout_pb2.TaskResult
    def __init__(self, member_id: _Optional[str] = ..., result: _Optional[_Union[_rollout_pb2.TaskResult, _Mapping]] = ...) -> None: ...

class BatchStreamOpened(_message.Message):
    __slots__ = ("member_id", "stream")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    stream: _trainer_service_pb2.StreamBatchesRequest
    def __init__(self, member_id: _Optional[str] = ..., stream: _Optional[_Union[_trainer_service_pb2.StreamBatchesRequest, _Mapping]] = ...) -> None: ...

class BatchAcked(_message.Message):
    __slots__ = ("member_id", "ack", "wait_s", "train_s")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    ack: _trainer_service_pb2.AckBatchRequest
    wait_s: float
    train_s: float
    def __init__(self, member_id: _Optional[str] = ..., ack: _Optional[_Union[_trainer_service_pb2.AckBatchRequest, _Mapping]] = ..., wait_s: _Optional[float] = ..., train_s: _Optional[float] = ...) -> None: ...

class VersionPublished(_message.Message):
    __slots__ = ("member_id", "version")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    version: _version_pb2.VersionInfo
    def __init__(self, member_id: _Optional[str] = ..., version: _Optional[_Union[_version_pb2.VersionInfo, _Mapping]] = ...) -> None: ...

class PublishRequested(_message.Message):
    __slots__ = ("member_id", "policy_id")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    policy_id: str
    def __init__(self, member_id: _Optional[str] = ..., policy_id: _Optional[str] = ...) -> None: ...

class VersionReported(_message.Message):
    __slots__ = ("member_id", "report")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    report: _version_service_pb2.ReportVersionRequest
    def __init__(self, member_id: _Optional[str] = ..., report: _Optional[_Union[_version_service_pb2.ReportVersionRequest, _Mapping]] = ...) -> None: ...

class PromptsOffered(_message.Message):
    __slots__ = ("prompts", "is_last", "data_set", "is_again")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    IS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[_task_pb2.Prompt]
    is_last: bool
    data_set: str
    is_again: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[_task_pb2.Prompt, _Mapping]]] = ..., is_last: _Optional[bool] = ..., data_set: _Optional[str] = ..., is_again: _Optional[bool] = ...) -> None: ...

class EvalPromptsOffered(_message.Message):
    __slots__ = ("eval_run_id", "data_sets", "goes_on")
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SETS_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    data_sets: _containers.RepeatedCompositeFieldContainer[DataSetPrompts]
    goes_on: bool
    def __init__(self, eval_run_id: _Optional[str] = ..., data_sets: _Optional[_Iterable[_Union[DataSetPrompts, _Mapping]]] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class DataSetPrompts(_message.Message):
    __slots__ = ("data_set", "prompts")
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    data_set: str
    prompts: _containers.RepeatedCompositeFieldContainer[_task_pb2.Prompt]
    def __init__(self, data_set: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_task_pb2.Prompt, _Mapping]]] = ...) -> None: ...

class EvalCreated(_message.Message):
    __slots__ = ("request_id", "suite", "versions", "pool_share")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    POOL_SHARE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    suite: str
    versions: _containers.ScalarMap[str, int]
    pool_share: float
    def __init__(self, request_id: _Optional[str] = ..., suite: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., pool_share: _Optional[float] = ...) -> None: ...

class EvalCancelled(_message.Message):
    __slots__ = ("eval_run_id",)
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    def __init__(self, eval_run_id: _Optional[str] = ...) -> None: ...

class RunPaused(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunResumed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberDrained(_message.Message):
    __slots__ = ("member_id", "grace")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    grace: _duration_pb2.Duration
    def __init__(self, member_id: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RunStopped(_message.Message):
    __slots__ = ("mode", "grace")
    MODE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    mode: _control_service_pb2.StopMode
    grace: _duration_pb2.Duration
    def __init__(self, mode: _Optional[_Union[_control_service_pb2.StopMode, str]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RunBroken(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _failure_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class PromptRequeued(_message.Message):
    __slots__ = ("prompt_id",)
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    def __init__(self, prompt_id: _Optional[str] = ...) -> None: ...

class SaveRequested(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class Ticked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
