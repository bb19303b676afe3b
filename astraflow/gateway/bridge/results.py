"""What an HTTP RaaS returns for a prompt, as rollouts of the task: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import (
    FinishReason,
    Outcome,
    Rollout,
    SampleFailure,
    Trajectory,
    spans_of,
)
from astraflow.core.tasks import RolloutTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskYield:
    """What came of a task: every sample is a rollout or a failure."""

    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[SampleFailure, ...] = ()


def failed(task: RolloutTask, failure: Failure) -> TaskYield:
    """Return a yield of nothing."""
    return TaskYield(
        failures=tuple(SampleFailure(sample_index=i, failure=failure) for i in task.sample_indexes)
    )


def yield_of(
    task: RolloutTask, item: Mapping[str, Any], versions: Mapping[PolicyId, Mapping[int, int]]
) -> TaskYield:
    """Read an item of /pull.

    Args:
        task: That it answers.
        item: {task_id, result}; the result of one that failed is {ok: False, error}.
        versions: The version of every number that tokens may have, for the policies of the
            workflow; `model_ids` of sequences count in their order.
    """
    result = item.get("result")
    if not isinstance(result, Mapping):
        return _environment_failed(task, "it rejected the prompt")
    fields = cast("Mapping[str, Any]", result)
    if not fields.get("ok", True):
        return _environment_failed(task, str(fields.get("error"))[:300])
    try:
        return _read(task, fields, versions)
    except (AstraflowError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        why = f"the RaaS returned what is no result: {error!r}"
        return failed(task, Failure(reason=Reason.ROLLOUT_INVALID, message=why))


def _environment_failed(task: RolloutTask, why: str) -> TaskYield:
    return failed(task, Failure(reason=Reason.ENVIRONMENT_FAILED, message=f"the RaaS: {why}"))


def _read(
    task: RolloutTask,
    result: Mapping[str, Any],
    versions: Mapping[PolicyId, Mapping[int, int]],
) -> TaskYield:
    rewards = np.asarray(result["rewards"], np.float64).reshape(-1)
    metrics = _numbers(result.get("agent_metrics"))
    rollouts: list[Rollout] = []
    failures: list[SampleFailure] = []
    for place, index in enumerate(task.sample_indexes):
        if place >= len(rewards):
            why = f"the RaaS returned {len(rewards)} of {len(task.sample_indexes)} samples"
            failure = Failure(reason=Reason.ENVIRONMENT_FAILED, message=why)
            failures.append(SampleFailure(sample_index=index, failure=failure))
            continue
        given = result["trajectories"][place]
        rollout_id = RolloutId(f"{task.task_id}-{index}")
        rollouts.append(
            Rollout(
                rollout_id=rollout_id,
                task_id=task.task_id,
                group_id=task.group_id,
                sample_index=index,
                outcome=Outcome.SCORED,
                reward=float(rewards[place]),
                trajectories=tuple(
                    _trajectory(task, f"{rollout_id}-{number}", number, sequence, versions)
                    for number, sequence in enumerate(given["sequences"])
                ),
                metrics=metrics | _numbers(given.get("stats")),
                traceparent=task.traceparent,
            )
        )
    return TaskYield(rollouts=tuple(rollouts), failures=tuple(failures))


def _trajectory(
    task: RolloutTask,
    name: str,
    number: int,
    sequence: Mapping[str, Any],
    versions: Mapping[PolicyId, Mapping[int, int]],
) -> Trajectory:
    """Read a sequence: tensors [1, L]; what attention_mask hides is padding.

    Raises:
        ValueError: Tokens were sampled with weights that were not pulled from here.
    """
    tokens = _row(sequence["input_ids"], np.int32)
    there = _row(sequence.get("attention_mask", np.ones(len(tokens))), np.bool_)
    sampled = _row(sequence["loss_mask"], np.bool_) & there
    logprobs = np.where(sampled, _row(sequence["logprobs"], np.float32), np.float32(0))
    policy_id = _policy(sequence.get("model_ids"), tuple(versions))
    numbers = _row(sequence["versions"], np.int64)[sampled]
    known = versions[policy_id]
    if unknown := set(numbers.tolist()) - known.keys():
        raise ValueError(f"tokens of {policy_id} of version {min(unknown)}, which it never pulled")
    rewards = sequence.get("rewards")
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        policy_id=policy_id,
        tokens=tokens[there],
        sampled_mask=sampled[there],
        logprobs=np.minimum(logprobs[there], np.float32(0)),
        version_spans=spans_of(np.array([known[each] for each in numbers.tolist()], np.int64)),
        sampling=task.sampling[policy_id],
        finish_reason=FinishReason.STOP,
        segment_index=number,
        reward=None if rewards is None else float(np.asarray(rewards).reshape(-1)[0]),
        engine="http",
    )


def _row(values: Any, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values).reshape(-1).astype(dtype))


def _policy(model_ids: Any, policy_ids: Sequence[PolicyId]) -> PolicyId:
    """Return the policy of the first sampled token; without ids, the workflow's first."""
    if model_ids is None:
        return policy_ids[0]
    named = _row(model_ids, np.int64)
    named = named[named >= 0]
    return policy_ids[int(named[0])] if len(named) else policy_ids[0]


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    known = cast("Mapping[Any, Any]", values)
    return {
        str(name): float(value) for name, value in known.items() if isinstance(value, int | float)
    }
