"""astraflow.rollout.v1: prompts, tasks, and how they are sampled."""

from functools import lru_cache, partial

from astraflow.core.rollouts import LARGEST
from astraflow.core.tasks import (
    Prompt,
    RegisteredCode,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.wire.converters import FieldRule, converted, converter, least
from astraflow.wire.fields import decode_json, encode_json, invalid, required
from astraflow_proto.rollout.v1 import sampling_pb2, task_pb2

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
    return sampling_pb2.SamplingParams.FromString(write_sampling(sampling))


@lru_cache(maxsize=_KEPT_COUNT)
def write_sampling(sampling: SamplingParams) -> bytes:
    """Return serialized SamplingParams; what is at its default stays unset."""
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
    return message.SerializeToString()


def decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingParams:
    return read_sampling(message.SerializeToString())


@lru_cache(maxsize=_KEPT_COUNT)
def read_sampling(data: bytes) -> SamplingParams:
    """Read serialized SamplingParams, as `decode_sampling`."""
    message = sampling_pb2.SamplingParams.FromString(data)
    given = {knob: getattr(message, knob) for knob in _KNOBS if message.HasField(knob)}
    sampling = SamplingParams(
        **given,
        max_new_tokens=message.max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
    )
    if sampling.max_new_tokens < 0:
        raise invalid("max_new_tokens", f"{sampling.max_new_tokens} is below 0")
    if sampling.min_new_tokens < 0:
        raise invalid("min_new_tokens", f"{sampling.min_new_tokens} is below 0")
    if not 0 <= sampling.temperature <= LARGEST:
        raise invalid("temperature", f"{sampling.temperature} is not in [0, {LARGEST:g}]")
    if not 0 < sampling.top_p <= 1:
        raise invalid("top_p", f"{sampling.top_p} is not in (0, 1]")
    if not 0 <= sampling.min_p < 1:
        raise invalid("min_p", f"{sampling.min_p} is not in [0, 1)")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise invalid("top_k", f"{sampling.top_k} is below 1")
    if not sampling.repetition_penalty > 0:
        raise invalid("repetition_penalty", f"{sampling.repetition_penalty} is not above 0")
    return sampling


converted(SamplingParams, sampling_pb2.SamplingParams, encode_sampling, decode_sampling)

converter(RegisteredCode, task_pb2.RegisteredCode, name=required)


def _json(name: str) -> FieldRule:
    """Return the rule of a field that is one JSON object."""
    return FieldRule(name=name, encode=encode_json, decode=partial(decode_json, field=name))


converter(
    WorkflowSpec,
    task_pb2.Workflow,
    workflow_id=required,
    options=_json("options_json"),
    scorer_options=_json("scorer_options_json"),
)

encode_prompt, decode_prompt = converter(
    Prompt, task_pb2.Prompt, prompt_id=required, epoch=least(0), fields=_json("data_json")
)


def _must_rise(bounds: VersionRange) -> None:
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        raise invalid("versions", f"{bounds.min} is above {bounds.max}")


converter(VersionRange, task_pb2.VersionRange, check=_must_rise)


def _must_be_whole(task: RolloutTask) -> None:
    indexes = task.sample_indexes
    if not indexes or min(indexes) < 0 or len(set(indexes)) < len(indexes):
        raise invalid("sample_indexes", "need at least one, each from 0, no two equal")
    if (task.eval_run_id is not None) is not (task.purpose is TaskPurpose.EVAL):
        raise invalid("eval_run_id", "goes with an evaluation, and only with it")


encode_rollout_task, decode_rollout_task = converter(
    RolloutTask,
    task_pb2.RolloutTask,
    without={"prefixes"},
    check=_must_be_whole,
    task_id=required,
    group_id=required,
    attempt=least(0),
    workflow_id=required,
)
