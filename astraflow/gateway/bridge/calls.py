"""Calls to a RaaS that speaks HTTP, and what it returns for a prompt, as rollouts of the task."""

from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

import numpy as np
import structlog

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import (
    FinishReason,
    Outcome,
    Rollout,
    SampleFailure,
    TaskResult,
    Trajectory,
    spans_of,
)
from astraflow.core.tasks import RolloutTask
from astraflow.gateway.http import PICKLE
from astraflow.rpc.peers import DialRules, Peer
from astraflow.rpc.reading import read

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_CALL_S = 30.0

# What reading raises of an item that is no result.
_NO_RESULT = (
    AstraflowError,
    AttributeError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)


class RaasCalls:
    """One RaaS; every call raises SOURCE_UNREACHABLE, or ENVIRONMENT_FAILED for what it answers."""

    def __init__(self, url: str, *, load_timeout_s: float, dial: DialRules) -> None:
        self.url = url.rstrip("/")
        self._load_timeout_s = load_timeout_s
        self._peer = Peer(url, dial)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._peer.__aexit__()

    async def status(self) -> Mapping[str, Any]:
        """Return what it says of itself."""
        return await self._peer.ask_json("GET", "/status")

    async def available(self) -> int:
        """Return how many more prompts it takes."""
        answer = await self._peer.ask_json("GET", "/availability")
        return max(0, self._number(answer, "available"))

    async def register_workflow(self, fields: Mapping[str, Any]) -> None:
        """Name a workflow that it has."""
        await self._call("/register_workflow", fields)

    async def submit(self, data: Mapping[str, Any], workflow_id: str, *, is_eval: bool) -> int:
        """Give it a prompt; return its number of the task."""
        path = "/eval_submit" if is_eval else "/submit"
        answer = await self._call(path, {"data": dict(data), "workflow_id": workflow_id})
        return self._number(self._mapping(answer), "task_id")

    async def pull(self, *, is_eval: bool) -> list[Mapping[str, Any]]:
        """Take what has finished; what is taken here is nowhere else.

        Each has the number of a task: what has none is dropped, and costs no other its result.
        """
        path = "/eval_pull" if is_eval else "/pull"
        answer = await self._call(path, {"max_items": 16, "timeout": 0.1})
        items = self._mapping(answer).get("items") if is_eval else answer
        if not isinstance(items, list):
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url}{path} answers no list")
        results = cast("list[Any]", items)
        numbered = [
            cast("Mapping[str, Any]", each)
            for each in results
            if isinstance(each, dict) and type(cast("Any", each).get("task_id")) is int
        ]
        if len(numbered) < len(results):
            count = len(results) - len(numbered)
            log.warning("an HTTP RaaS returned results of no task", url=self.url, count=count)
        return numbered

    async def mark_evals(self, *, are_on: bool) -> None:
        """Say that evaluations begin, or that they have ended."""
        await self._call("/eval_start" if are_on else "/eval_end", {})

    async def notify_version(self, model_id: str, version: int, sender: str) -> Mapping[str, Any]:
        """Have it load a version; returns once it has, or not."""
        fields = {"model_id": model_id, "version": version, "sender_endpoint": sender}
        return self._mapping(await self._call("/notify_version", fields, self._load_timeout_s))

    async def shutdown(self) -> None:
        await self._call("/shutdown", {})

    async def _call(self, path: str, fields: Mapping[str, Any], timeout_s: float = _CALL_S) -> Any:
        body = b"".join(pickle_chunks(fields))
        _, raw = await self._peer.ask("POST", path, body, kind=PICKLE, timeout_s=timeout_s)
        envelope = self._mapping(await read(read_pickle, raw))
        if not envelope.get("ok"):
            # Whoever named the RaaS is told that it refuses; what it says is for this log.
            log.warning(
                "an HTTP RaaS refuses",
                url=self.url,
                path=path,
                why=str(envelope.get("error"))[:300],
            )
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url}{path} refuses")
        return envelope.get("result")

    def _mapping(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url} answers no dict")
        return cast("Mapping[str, Any]", value)

    def _number(self, fields: Mapping[str, Any], name: str) -> int:
        value = fields.get(name)
        if type(value) is not int:
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url} says no number of {name}")
        return value


TaskYield = tuple[tuple[Rollout, ...], TaskResult]
"""What came of a task: every sample is a rollout, or a failure in its result."""

Models = Mapping[int, tuple[PolicyId, Mapping[int, int]]]
"""By the number in `model_ids`: a policy, and the version of every number that its tokens may have.
The first one sampled what has no `model_ids`."""


def failed(task: RolloutTask, failure: Failure) -> TaskYield:
    """Return a yield of nothing."""
    failures = [SampleFailure(sample_index=i, failure=failure) for i in task.sample_indexes]
    return (), TaskResult(task_id=task.task_id, rollout_count=0, failures=tuple(failures))


def yield_of(task: RolloutTask, item: Mapping[str, Any], models: Models) -> TaskYield:
    """Read an item of /pull.

    Args:
        task: That it answers.
        item: {task_id, result}; the result of one that failed is {ok: False, error}.
        models: Of the task's workflow.
    """
    result = item.get("result")
    if not isinstance(result, Mapping):
        return _environment_failed(task, "it rejected the prompt")
    fields = cast("Mapping[str, Any]", result)
    try:
        if not fields.get("ok", True):
            return _environment_failed(task, str(fields.get("error"))[:300])
        return _read(task, fields, models)
    except _NO_RESULT as error:
        why = f"the RaaS returned what is no result: {error!r}"
        return failed(task, Failure(reason=Reason.ROLLOUT_INVALID, message=why))


def _environment_failed(task: RolloutTask, why: str) -> TaskYield:
    return failed(task, Failure(reason=Reason.ENVIRONMENT_FAILED, message=f"the RaaS: {why}"))


def _read(task: RolloutTask, given: Mapping[str, Any], models: Models) -> TaskYield:
    rewards = np.asarray(given["rewards"], np.float64).reshape(-1)
    metrics = _numbers(given.get("agent_metrics"))
    rollouts: list[Rollout] = []
    failures: list[SampleFailure] = []
    for place, index in enumerate(task.sample_indexes):
        if place >= len(rewards):
            why = f"the RaaS returned {len(rewards)} of {len(task.sample_indexes)} samples"
            failure = Failure(reason=Reason.ENVIRONMENT_FAILED, message=why)
            failures.append(SampleFailure(sample_index=index, failure=failure))
            continue
        trajectory = given["trajectories"][place]
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
                    part
                    for number, sequence in enumerate(trajectory["sequences"])
                    for part in _trajectories(
                        task, f"{rollout_id}-{number}", number, sequence, models
                    )
                ),
                metrics=metrics | _numbers(trajectory.get("stats")),
                traceparent=task.traceparent,
            )
        )
    result = TaskResult(task_id=task.task_id, rollout_count=len(rollouts), failures=tuple(failures))
    return tuple(rollouts), result


def _trajectories(
    task: RolloutTask, name: str, number: int, sequence: Mapping[str, Any], models: Models
) -> Iterator[Trajectory]:
    """Read a sequence: tensors [1, L]; what attention_mask hides is padding.

    Where several policies sampled it, it is a trajectory of each, with what that policy sampled.
    """
    tokens = _row(sequence["input_ids"], np.int32)

    def column(name: str, dtype: Any) -> np.ndarray:
        values = _row(sequence[name], dtype)
        # One value would count for all tokens.
        if len(values) != len(tokens):
            raise ValueError(f"{name} has {len(values)} values for {len(tokens)} tokens")
        return values

    has_padding = "attention_mask" in sequence
    there = column("attention_mask", np.bool_) if has_padding else np.ones(len(tokens), np.bool_)
    loss_mask = column("loss_mask", np.bool_) & there
    logprobs, numbers = column("logprobs", np.float32), column("versions", np.int64)
    owners = np.full(len(tokens), next(iter(models)))
    if sequence.get("model_ids") is not None and loss_mask.any():
        owners = column("model_ids", np.int64)
    rewards = sequence.get("rewards")
    named: list[int] = np.unique(owners[loss_mask]).tolist()
    for owner in named or [next(iter(models))]:
        if owner not in models:
            raise ValueError(f"model_ids has {owner}, which is no policy of the workflow")
        policy_id, versions = models[owner]
        sampled = loss_mask & (owners == owner)
        told: list[int] = numbers[sampled].tolist()
        if unknown := set(told) - versions.keys():
            why = f"tokens of {policy_id} of version {min(unknown)}, which it never pulled"
            raise ValueError(why)
        yield Trajectory(
            trajectory_id=TrajectoryId(name if len(named) < 2 else f"{name}-{policy_id}"),
            policy_id=policy_id,
            tokens=tokens[there],
            sampled_mask=sampled[there],
            logprobs=np.where(sampled, np.minimum(logprobs, 0), np.float32(0))[there],
            version_spans=spans_of(np.array([versions[each] for each in told], np.int64)),
            sampling=task.sampling[policy_id],
            finish_reason=FinishReason.STOP,
            segment_index=number,
            reward=None if rewards is None else float(np.asarray(rewards).reshape(-1)[0]),
            engine="http",
        )


def _row(values: Any, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values).reshape(-1).astype(dtype))


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    known = cast("Mapping[Any, Any]", values)
    return {
        str(name): float(value) for name, value in known.items() if isinstance(value, int | float)
    }
