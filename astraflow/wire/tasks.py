"""astraflow.rollout.v1: prompts, tasks, and how they are sampled."""

from functools import lru_cache

from astraflow.core.ids import EvalRunId, GroupId, PolicyId, PromptId, TaskId, WorkflowId
from astraflow.core.tasks import (
    Prompt,
    RegisteredCode,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.wire.fields import (
    EnumTable,
    at_least,
    decode_json,
    encode_json,
    invalid,
    optional,
    optional_span,
    optional_time,
    required,
    set_span,
    set_time,
)
from astraflow_proto.rollout.v1 import sampling_pb2, task_pb2

PURPOSES = EnumTable(TaskPurpose, task_pb2.TaskPurpose, "TASK_PURPOSE")
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
# Thousands of rollouts are sampled alike.
_KEPT_COUNT = 256


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
    return _read_sampling(message.SerializeToString())


@lru_cache(maxsize=_KEPT_COUNT)
def _read_sampling(data: bytes) -> SamplingParams:
    message = sampling_pb2.SamplingParams.FromString(data)
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
    return task_pb2.RegisteredCode(name=code.name, code_digest=code.code_digest)


def decode_code(message: task_pb2.RegisteredCode) -> RegisteredCode:
    """Read a RegisteredCode.

    Raises:
        AstraflowError: INVALID_FIELD without a name.
    """
    return RegisteredCode(name=required(message.name, "name"), code_digest=message.code_digest)


def encode_workflow(spec: WorkflowSpec) -> task_pb2.Workflow:
    return task_pb2.Workflow(
        workflow_id=spec.workflow_id,
        code=encode_code(spec.code),
        options_json=encode_json(spec.options),
        scorer=None if spec.scorer is None else encode_code(spec.scorer),
        scorer_options_json=encode_json(spec.scorer_options),
        policy_ids=spec.policy_ids,
        policy_fault_reward=spec.policy_fault_reward,
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
        policy_fault_reward=message.policy_fault_reward,
    )


def encode_prompt(prompt: Prompt) -> task_pb2.Prompt:
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
