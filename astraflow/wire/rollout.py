"""astraflow.rollout.v1: tasks, rollouts, trajectories, batches."""

from collections.abc import Mapping
from typing import Any

from astraflow.core.batches import BatchGroup, BatchHeader, BatchPart, EndCause, EndOfData
from astraflow.core.dtype import Dtype
from astraflow.core.ids import (
    BatchId,
    EvalRunId,
    GroupId,
    PolicyId,
    PromptId,
    RolloutId,
    TaskId,
    TrajectoryId,
    WorkflowId,
)
from astraflow.core.rollouts import (
    Column,
    ColumnAxis,
    FinishReason,
    KvPolicy,
    Outcome,
    Rollout,
    SampleFailure,
    TaskResult,
    Trajectory,
    VersionSpan,
)
from astraflow.core.tasks import (
    Prompt,
    RegisteredCode,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.wire.common import decode_failure, encode_failure
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import (
    at_least,
    decode_json,
    decode_tensor,
    decode_vector,
    encode_json,
    encode_tensor,
    encode_versions,
    invalid,
    optional,
    optional_span,
    optional_time,
    required,
    set_span,
    set_time,
)
from astraflow_proto.rollout.v1 import (
    batch_pb2,
    column_pb2,
    rollout_pb2,
    sampling_pb2,
    task_pb2,
    trajectory_pb2,
)

OUTCOMES = EnumTable(Outcome, rollout_pb2.Outcome, "OUTCOME")
FINISH_REASONS = EnumTable(FinishReason, trajectory_pb2.FinishReason, "FINISH_REASON")
KV_POLICIES = EnumTable(
    KvPolicy, trajectory_pb2.KvPolicy, "KV_POLICY", unspecified=KvPolicy.UNKNOWN
)
COLUMN_AXES = EnumTable(ColumnAxis, column_pb2.ColumnAxis, "COLUMN_AXIS")
PURPOSES = EnumTable(TaskPurpose, task_pb2.TaskPurpose, "TASK_PURPOSE")
END_CAUSES = EnumTable(EndCause, batch_pb2.EndCause, "END_CAUSE")

_KNOBS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_DEFAULT_SAMPLING = SamplingParams()


def encode_sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return SamplingParams for the wire; what is at its default stays unset."""
    message = sampling_pb2.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop_strings=sampling.stop_strings,
        ignore_eos=sampling.ignore_eos,
    )
    for knob in _KNOBS:
        value = getattr(sampling, knob)
        if value != getattr(_DEFAULT_SAMPLING, knob):
            setattr(message, knob, value)
    return message


def decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Read SamplingParams.

    Raises:
        AstraflowError: INVALID_FIELD for a knob out of range.
    """
    given = {knob: getattr(message, knob) for knob in _KNOBS if message.HasField(knob)}
    sampling = SamplingParams(
        **given,
        max_new_tokens=at_least(message.max_new_tokens, 0, "max_new_tokens"),
        min_new_tokens=at_least(message.min_new_tokens, 0, "min_new_tokens"),
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
    )
    if not sampling.temperature >= 0:
        raise invalid("temperature", f"{sampling.temperature} is below 0")
    if not 0 < sampling.top_p <= 1:
        raise invalid("top_p", f"{sampling.top_p} is not in (0, 1]")
    if not 0 <= sampling.min_p < 1:
        raise invalid("min_p", f"{sampling.min_p} is not in [0, 1)")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise invalid("top_k", f"{sampling.top_k} is below 1")
    if not sampling.repetition_penalty > 0:
        raise invalid("repetition_penalty", f"{sampling.repetition_penalty} is not above 0")
    return sampling


def encode_code(code: RegisteredCode) -> task_pb2.RegisteredCode:
    """Return a RegisteredCode for the wire."""
    return task_pb2.RegisteredCode(name=code.name, code_digest=code.code_digest)


def decode_code(message: task_pb2.RegisteredCode) -> RegisteredCode:
    """Read a RegisteredCode.

    Raises:
        AstraflowError: INVALID_FIELD without a name.
    """
    return RegisteredCode(name=required(message.name, "name"), code_digest=message.code_digest)


def encode_workflow(spec: WorkflowSpec) -> task_pb2.Workflow:
    """Return a WorkflowSpec for the wire."""
    return task_pb2.Workflow(
        workflow_id=spec.workflow_id,
        code=encode_code(spec.code),
        options_json=encode_json(spec.options),
        scorer=None if spec.scorer is None else encode_code(spec.scorer),
        scorer_options_json=encode_json(spec.scorer_options),
        policy_ids=spec.policy_ids,
    )


def decode_workflow(message: task_pb2.Workflow) -> WorkflowSpec:
    """Read a WorkflowSpec.

    Raises:
        AstraflowError: INVALID_FIELD without ids, or for options that are no JSON object.
    """
    return WorkflowSpec(
        workflow_id=WorkflowId(required(message.workflow_id, "workflow_id")),
        code=decode_code(message.code),
        options=decode_json(message.options_json, "options_json"),
        scorer=decode_code(message.scorer) if message.HasField("scorer") else None,
        scorer_options=decode_json(message.scorer_options_json, "scorer_options_json"),
        policy_ids=tuple(map(PolicyId, message.policy_ids)),
    )


def encode_prompt(prompt: Prompt) -> task_pb2.Prompt:
    """Return a Prompt for the wire."""
    return task_pb2.Prompt(
        prompt_id=prompt.prompt_id,
        data_set=prompt.data_set,
        epoch=prompt.epoch,
        data_json=encode_json(prompt.fields),
        blobs=prompt.blobs,
        labels=prompt.labels,
    )


def decode_prompt(message: task_pb2.Prompt) -> Prompt:
    """Read a Prompt.

    Raises:
        AstraflowError: INVALID_FIELD without an id, or for data that is no JSON object.
    """
    return Prompt(
        prompt_id=PromptId(required(message.prompt_id, "prompt_id")),
        data_set=message.data_set,
        epoch=at_least(message.epoch, 0, "epoch"),
        fields=decode_json(message.data_json, "data_json"),
        blobs=dict(message.blobs),
        labels=dict(message.labels),
    )


def encode_rollout_task(task: RolloutTask) -> task_pb2.RolloutTask:
    """Return a RolloutTask for the wire."""
    message = task_pb2.RolloutTask(
        task_id=task.task_id,
        group_id=task.group_id,
        attempt=task.attempt,
        purpose=PURPOSES.encode(task.purpose),
        workflow_id=task.workflow_id,
        prompt=encode_prompt(task.prompt),
        sample_indexes=task.sample_indexes,
        versions={
            policy: task_pb2.VersionRange(min=bounds.min, max=bounds.max)
            for policy, bounds in task.versions.items()
        },
        sampling={policy: encode_sampling(knobs) for policy, knobs in task.sampling.items()},
        priority=task.priority,
        session_affinity=task.session_affinity,
        eval_run_id=task.eval_run_id or "",
        traceparent=task.traceparent,
    )
    set_time(message.deadline, task.deadline)
    set_span(message.timeout, task.timeout)
    return message


def decode_rollout_task(message: task_pb2.RolloutTask) -> RolloutTask:
    """Read a RolloutTask.

    Raises:
        AstraflowError: INVALID_FIELD when ids are missing, samples repeat, or an evaluation is
            named where there is none.
    """
    indexes = tuple(message.sample_indexes)
    purpose = PURPOSES.decode(message.purpose)
    if not indexes or min(indexes) < 0 or len(set(indexes)) < len(indexes):
        raise invalid("sample_indexes", "need at least one, each from 0, no two equal")
    if bool(message.eval_run_id) is not (purpose is TaskPurpose.EVAL):
        raise invalid("eval_run_id", "goes with an evaluation, and only with it")
    return RolloutTask(
        task_id=TaskId(required(message.task_id, "task_id")),
        group_id=GroupId(required(message.group_id, "group_id")),
        attempt=at_least(message.attempt, 0, "attempt"),
        purpose=purpose,
        workflow_id=WorkflowId(required(message.workflow_id, "workflow_id")),
        prompt=decode_prompt(message.prompt),
        sample_indexes=indexes,
        versions={PolicyId(name): _version_range(v) for name, v in message.versions.items()},
        sampling={PolicyId(name): decode_sampling(k) for name, k in message.sampling.items()},
        deadline=optional_time(message, "deadline"),
        timeout=optional_span(message, "timeout"),
        priority=message.priority,
        session_affinity=message.session_affinity,
        eval_run_id=EvalRunId(message.eval_run_id) if message.eval_run_id else None,
        traceparent=message.traceparent,
    )


def _version_range(message: task_pb2.VersionRange) -> VersionRange:
    bounds = VersionRange(min=optional(message, "min"), max=optional(message, "max"))
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        raise invalid("versions", f"{bounds.min} is above {bounds.max}")
    return bounds


def encode_columns(columns: Mapping[str, Column]) -> dict[str, column_pb2.Column]:
    """Return columns for the wire."""
    return {
        name: column_pb2.Column(
            axis=COLUMN_AXES.encode(column.axis), tensor=encode_tensor(column.values)
        )
        for name, column in columns.items()
    }


def decode_columns(messages: Mapping[str, column_pb2.Column]) -> dict[str, Column]:
    """Read columns.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown axis or a malformed tensor.
    """
    return {
        name: Column(
            axis=COLUMN_AXES.decode(column.axis), values=decode_tensor(column.tensor, name)
        )
        for name, column in messages.items()
    }


def encode_trajectory(trajectory: Trajectory) -> trajectory_pb2.Trajectory:
    """Return a Trajectory for the wire."""
    return trajectory_pb2.Trajectory(
        trajectory_id=trajectory.trajectory_id,
        policy_id=trajectory.policy_id,
        agent=trajectory.agent,
        tokens=encode_tensor(trajectory.tokens),
        sampled_mask=encode_tensor(trajectory.sampled_mask),
        logprobs=encode_tensor(trajectory.logprobs),
        version_spans=map(_encode_version_span, trajectory.version_spans),
        sampling=encode_sampling(trajectory.sampling),
        finish_reason=FINISH_REASONS.encode(trajectory.finish_reason),
        parent_trajectory_id=trajectory.parent_trajectory_id or "",
        branch_offset=trajectory.branch_offset,
        segment_index=trajectory.segment_index,
        reward=trajectory.reward,
        columns=encode_columns(trajectory.columns),
        engine=trajectory.engine,
    )


def _encode_version_span(span: VersionSpan) -> trajectory_pb2.VersionSpan:
    return trajectory_pb2.VersionSpan(
        version=span.version,
        length=span.length,
        kv=KV_POLICIES.encode(span.kv),
        policy_id=span.policy_id or "",
    )


def _decode_version_span(message: trajectory_pb2.VersionSpan) -> VersionSpan:
    return VersionSpan(
        version=message.version,
        length=message.length,
        kv=KV_POLICIES.decode(message.kv),
        policy_id=PolicyId(message.policy_id) if message.policy_id else None,
    )


def decode_trajectory(message: trajectory_pb2.Trajectory) -> Trajectory:
    """Read a Trajectory.

    Raises:
        AstraflowError: INVALID_FIELD, ROLLOUT_INVALID.
    """
    parent = message.parent_trajectory_id
    return Trajectory(
        trajectory_id=TrajectoryId(required(message.trajectory_id, "trajectory_id")),
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        agent=message.agent,
        tokens=decode_vector(message.tokens, Dtype.I32, "tokens"),
        sampled_mask=decode_vector(message.sampled_mask, Dtype.BOOL, "sampled_mask"),
        logprobs=decode_vector(message.logprobs, Dtype.F32, "logprobs"),
        version_spans=tuple(map(_decode_version_span, message.version_spans)),
        sampling=decode_sampling(message.sampling),
        finish_reason=FINISH_REASONS.decode(message.finish_reason),
        parent_trajectory_id=TrajectoryId(parent) if parent else None,
        branch_offset=message.branch_offset,
        segment_index=at_least(message.segment_index, 0, "segment_index"),
        reward=optional(message, "reward"),
        columns=decode_columns(message.columns),
        engine=message.engine,
    )


def encode_rollout(rollout: Rollout) -> rollout_pb2.Rollout:
    """Return a Rollout for the wire."""
    message = rollout_pb2.Rollout(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        outcome=OUTCOMES.encode(rollout.outcome),
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        failure=None if rollout.failure is None else encode_failure(rollout.failure),
        reward_code_digest=rollout.reward_code_digest,
        trajectories=map(encode_trajectory, rollout.trajectories),
        policy_versions=encode_versions(rollout.policy_versions),
        metrics=rollout.metrics,
        traceparent=rollout.traceparent,
    )
    set_time(message.start_time, rollout.start_time)
    set_time(message.finish_time, rollout.finish_time)
    return message


def decode_rollout(message: rollout_pb2.Rollout) -> Rollout:
    """Read a Rollout, whole.

    Raises:
        AstraflowError: INVALID_FIELD, ROLLOUT_INVALID.
    """
    return Rollout(
        rollout_id=RolloutId(required(message.rollout_id, "rollout_id")),
        task_id=TaskId(required(message.task_id, "task_id")),
        group_id=GroupId(required(message.group_id, "group_id")),
        sample_index=message.sample_index,
        outcome=OUTCOMES.decode(message.outcome),
        reward=optional(message, "reward"),
        reward_parts=dict(message.reward_parts),
        failure=decode_failure(message.failure) if message.HasField("failure") else None,
        reward_code_digest=message.reward_code_digest,
        trajectories=tuple(map(decode_trajectory, message.trajectories)),
        metrics=dict(message.metrics),
        start_time=optional_time(message, "start_time"),
        finish_time=optional_time(message, "finish_time"),
        traceparent=message.traceparent,
    )


def encode_task_result(result: TaskResult) -> rollout_pb2.TaskResult:
    """Return a TaskResult for the wire."""
    failures = [
        rollout_pb2.SampleFailure(
            sample_index=each.sample_index, failure=encode_failure(each.failure)
        )
        for each in result.failures
    ]
    return rollout_pb2.TaskResult(
        task_id=result.task_id, rollout_count=result.rollout_count, failures=failures
    )


def decode_task_result(message: rollout_pb2.TaskResult) -> TaskResult:
    """Read a TaskResult.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    failures = [
        SampleFailure(sample_index=each.sample_index, failure=decode_failure(each.failure))
        for each in message.failures
    ]
    return TaskResult(
        task_id=TaskId(required(message.task_id, "task_id")),
        rollout_count=at_least(message.rollout_count, 0, "rollout_count"),
        failures=tuple(failures),
    )


def encode_batch_header(header: BatchHeader) -> batch_pb2.BatchHeader:
    """Return a BatchHeader for the wire."""
    fields: dict[str, Any] = {
        name: getattr(header, name) for name in BatchHeader.__slots__ if name != "groups"
    }
    return batch_pb2.BatchHeader(groups=map(_encode_group, header.groups), **fields)


def _encode_group(group: BatchGroup) -> batch_pb2.BatchGroup:
    return batch_pb2.BatchGroup(**{name: getattr(group, name) for name in BatchGroup.__slots__})


def decode_batch_header(message: batch_pb2.BatchHeader) -> BatchHeader:
    """Read a BatchHeader.

    Raises:
        AstraflowError: INVALID_FIELD when ids are missing or a rank is none of the world's.
    """
    if not 0 <= message.rank < message.world_size:
        raise invalid("rank", f"{message.rank} is none of {message.world_size}")
    return BatchHeader(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=message.version,
        rank=message.rank,
        world_size=message.world_size,
        part_count=at_least(message.part_count, 0, "part_count"),
        row_count=message.row_count,
        token_count=message.token_count,
        loss_token_count=message.loss_token_count,
        groups=tuple(map(_decode_group, message.groups)),
        policy_ids=tuple(map(PolicyId, message.policy_ids)),
        delivery_count=at_least(message.delivery_count, 1, "delivery_count"),
        metrics=dict(message.metrics),
    )


def _decode_group(message: batch_pb2.BatchGroup) -> BatchGroup:
    return BatchGroup(
        group_id=GroupId(message.group_id),
        prompt_id=PromptId(message.prompt_id),
        data_set=message.data_set,
        epoch=message.epoch,
        sample_count=message.sample_count,
        traceparent=message.traceparent,
    )


def encode_batch_part(part: BatchPart) -> batch_pb2.BatchPart:
    """Return a BatchPart for the wire."""
    return batch_pb2.BatchPart(
        batch_id=part.batch_id,
        index=part.index,
        row_offsets=encode_tensor(part.row_offsets),
        trajectory_ids=part.trajectory_ids,
        rollout_ids=part.rollout_ids,
        columns=encode_columns(part.columns),
    )


def decode_batch_part(message: batch_pb2.BatchPart) -> BatchPart:
    """Read a BatchPart.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return BatchPart(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        index=at_least(message.index, 0, "index"),
        row_offsets=decode_vector(message.row_offsets, Dtype.I64, "row_offsets"),
        trajectory_ids=tuple(map(TrajectoryId, message.trajectory_ids)),
        rollout_ids=tuple(map(RolloutId, message.rollout_ids)),
        columns=decode_columns(message.columns),
    )


def encode_end_of_data(end: EndOfData) -> batch_pb2.EndOfData:
    """Return an EndOfData for the wire."""
    return batch_pb2.EndOfData(cause=END_CAUSES.encode(end.cause), batch_count=end.batch_count)


def decode_end_of_data(message: batch_pb2.EndOfData) -> EndOfData:
    """Read an EndOfData.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown cause.
    """
    return EndOfData(cause=END_CAUSES.decode(message.cause), batch_count=message.batch_count)
