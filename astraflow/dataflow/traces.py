"""The hub's part of a trace: a prompt is chosen, its tasks go out, its batch is trained on."""

from collections import OrderedDict
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from astraflow.core.batches import AckBatch
from astraflow.core.effects import Effect, RecordRollout, SendBatch, SendTask
from astraflow.core.events import Event, TaskFinished
from astraflow.core.ids import BatchId, GroupId, RunId, TaskId
from astraflow.core.tasks import RolloutTask, TaskPurpose
from astraflow.telemetry.traces import context_below, group_context, record

Key = TypeVar("Key")
Value = TypeVar("Value")

# What is open is far less; what is lost, such as tasks of dead members, is forgotten.
_KEPT_COUNT = 16384


class HubTraces:
    """Gives contexts to what goes out, and records the hub's spans of it."""

    def __init__(self, run_id: RunId) -> None:
        self._run_id = run_id
        self._groups = OrderedDict[GroupId, None]()
        self._tasks = OrderedDict[TaskId, tuple[RolloutTask, int]]()
        self._batches = OrderedDict[BatchId, tuple[SendBatch, int]]()

    def stamp(self, effect: Effect, now: datetime) -> Effect:
        """Return an effect with the contexts of its groups."""
        match effect:
            case SendTask() if effect.task.purpose is TaskPurpose.TRAIN:
                return self._task(effect, _ns(now))
            case SendBatch():
                return self._batch(effect, _ns(now))
            case RecordRollout():
                self._accept(effect, _ns(now))
            case _:
                pass
        return effect

    def see(self, event: Event, answer: object) -> None:
        """Record what an event ends."""
        if isinstance(event, TaskFinished):
            self._end_task(event)
        elif isinstance(event, AckBatch) and answer is True:
            self._end_batch(event)

    def _task(self, effect: SendTask, now_ns: int) -> SendTask:
        task = effect.task
        above = group_context(self._run_id, task.group_id)
        if not above:
            return effect
        if task.group_id not in self._groups:
            _keep(self._groups, task.group_id, None)
            record(
                "rl.prompt",
                context=above,
                start_ns=now_ns,
                end_ns=now_ns,
                rl__run__id=self._run_id,
                group=task.group_id,
                prompt=task.prompt.prompt_id,
                data_set=task.prompt.data_set,
            )
        task = replace(task, traceparent=context_below(above, task.task_id))
        _keep(self._tasks, task.task_id, (task, now_ns))
        return replace(effect, task=task)

    def _end_task(self, event: TaskFinished) -> None:
        held = self._tasks.pop(event.result.task_id, None)
        if held is None:
            return
        task, started = held
        record(
            "rl.task",
            context=task.traceparent,
            parent=group_context(self._run_id, task.group_id),
            start_ns=started,
            task=task.task_id,
            attempt=task.attempt,
            member=event.member_id,
            rollout_count=event.result.rollout_count,
        )

    def _accept(self, effect: RecordRollout, arrived_ns: int) -> None:
        rollout = effect.rollout
        record(
            "rl.accept",
            parent=rollout.traceparent,
            start_ns=arrived_ns,
            rollout=rollout.rollout_id,
            member=effect.member_id,
            outcome=rollout.outcome.value,
        )

    def _batch(self, effect: SendBatch, now_ns: int) -> SendBatch:
        header = effect.header
        groups = tuple(
            replace(
                group,
                traceparent=context_below(
                    group_context(self._run_id, group.group_id), header.batch_id
                ),
            )
            for group in header.groups
        )
        effect = replace(effect, header=replace(header, groups=groups))
        if header.batch_id not in self._batches:
            _keep(self._batches, header.batch_id, (effect, now_ns))
        return effect

    def _end_batch(self, event: AckBatch) -> None:
        held = self._batches.pop(event.batch_id, None)
        if held is None:
            return
        effect, started = held
        for group in effect.header.groups:
            record(
                "rl.batch",
                context=group.traceparent,
                parent=group_context(self._run_id, group.group_id),
                start_ns=started,
                batch=event.batch_id,
                policy=effect.header.policy_id,
                version=effect.header.version,
                outcome=event.outcome.value,
                step=event.step,
            )


def _keep(held: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    held[key] = value
    if len(held) > _KEPT_COUNT:
        held.popitem(last=False)


def _ns(time: datetime) -> int:
    return int(time.timestamp() * 1e9)
