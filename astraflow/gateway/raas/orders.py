"""Orders: what a Dataflow submitted, until each has ended and was pulled as an item of /pull."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import PolicyId, TaskId
from astraflow.core.rollouts import NOT_SAMPLED, REWARDED, Rollout, TaskResult, Trajectory
from astraflow.core.tasks import (
    CancelReason,
    RolloutTask,
    TaskCancellation,
    TaskPurpose,
    VersionRange,
)
from astraflow.gateway.settings import model_index
from astraflow.raas.runner import EpisodeRunner

_NOTHING: Final = Failure(reason=Reason.ENVIRONMENT_FAILED, message="no sample came to a reward")


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """One prompt that was submitted.

    Attributes:
        number: The Dataflow's `task_id`.
        task: The attempt that runs, or is next: samples that have no reward yet, any version.
        rollouts: What came, by sample.
        failure: Of the sample that was given up last.
        is_cancelled: Whether nobody wants it any more.
    """

    number: int
    task: RolloutTask
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    failure: Failure = _NOTHING
    is_cancelled: bool = False

    @property
    def purpose(self) -> TaskPurpose:
        """Training or evaluation."""
        return self.task.purpose

    def try_again(self, max_attempts: int) -> bool:
        """Go on to the next attempt, of samples without a reward; False: there is none."""
        missing = tuple(each for each in self.task.sample_indexes if each not in self.rollouts)
        attempt = self.task.attempt + 1
        if not missing or self.is_cancelled or attempt >= max_attempts:
            return False
        task_id = TaskId(f"{self.task.group_id}-{attempt}")
        self.task = replace(self.task, task_id=task_id, attempt=attempt, sample_indexes=missing)
        return True


class OrderQueue:
    """Has a runner work on orders; every one ends once, and is here until it was delivered."""

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        pins: Callable[[RolloutTask], Mapping[PolicyId, VersionRange]],
        capacity: int,
        max_attempts: int,
    ) -> None:
        """Begin with nothing.

        Args:
            runner: Gives the queue what comes of tasks.
            pins: Returns what a task may be sampled with now.
            capacity: Samples that the runner is given at once; an order is not divided.
            max_attempts: Of one sample.
        """
        self.submitted_count = dict.fromkeys(TaskPurpose, 0)
        self._runner = runner
        self._pins = pins
        self._capacity = capacity
        self._max_attempts = max_attempts
        self._news = asyncio.Event()
        self._open: dict[TaskPurpose, dict[int, Order]] = {each: {} for each in TaskPurpose}
        self._waiting: dict[TaskPurpose, deque[Order]] = {each: deque() for each in TaskPurpose}
        self._running: dict[TaskId, Order] = {}
        self._finished: dict[TaskPurpose, dict[int, Order]] = {each: {} for each in TaskPurpose}
        self._delivering: set[int] = set()

    def open_count(self, purpose: TaskPurpose) -> int:
        """Orders of which more will come."""
        return len(self._open[purpose])

    def finished_count(self, purpose: TaskPurpose) -> int:
        """Orders that nobody has pulled."""
        return len(self._finished[purpose])

    def waiting_count(self, purpose: TaskPurpose) -> int:
        """Orders that the runner does not have."""
        return len(self._waiting[purpose])

    @property
    def free_count(self) -> int:
        """Samples that the runner takes at once beside those that it has."""
        return self._capacity - self._runner.running_count - self._runner.queued_count

    def submit(self, order: Order) -> None:
        self._open[order.purpose][order.number] = order
        self._waiting[order.purpose].append(order)
        self.submitted_count[order.purpose] += 1
        self._place()

    def _place(self) -> None:
        """Begin what there is room for; evaluations first."""
        for purpose in (TaskPurpose.EVAL, TaskPurpose.TRAIN):
            while self._waiting[purpose] and self.free_count > 0:
                order = self._waiting[purpose].popleft()
                self._running[order.task.task_id] = order
                self._runner.take(replace(order.task, versions=self._pins(order.task)))

    def send(self, rollout: Rollout) -> bool:
        """Take a rollout of the runner; it is never too large."""
        order = self._running.get(rollout.task_id)
        if order is not None and rollout.outcome in REWARDED and rollout.reward is not None:
            order.rollouts[rollout.sample_index] = rollout
        elif order is not None:
            order.failure = rollout.failure or _NOTHING
        return True

    def close_task(self, result: TaskResult) -> None:
        """End an attempt; samples that have no reward are tried again, not for ever."""
        self._close(result.task_id, [each.failure for each in result.failures])

    def give_back(self, task_id: TaskId, failure: Failure) -> None:
        """End an attempt that was not started."""
        self._close(task_id, [failure])

    def _close(self, task_id: TaskId, failures: Sequence[Failure]) -> None:
        order = self._running.pop(task_id)
        order.failure = failures[-1] if failures else order.failure
        if order.try_again(self._max_attempts):
            self._waiting[order.purpose].appendleft(order)
        else:
            self._open[order.purpose].pop(order.number)
            if not order.is_cancelled:
                self._finished[order.purpose][order.number] = order
        self._news.set()
        # The runner forgets the attempt only after this call.
        asyncio.get_running_loop().call_soon(self._place)

    def cancel(self, purpose: TaskPurpose) -> int:
        """Withdraw all orders of a purpose that are open; return how many there were."""
        orders = list(self._open[purpose].values())
        for order in self._waiting[purpose]:
            self._open[purpose].pop(order.number)
        self._waiting[purpose].clear()
        for order in orders:
            order.is_cancelled = True
            if order.task.task_id in self._running:
                withdrawn = TaskCancellation(task_id=order.task.task_id, reason=CancelReason.STALE)
                self._runner.cancel(withdrawn)
        return len(orders)

    def drop_finished(self, purpose: TaskPurpose) -> int:
        """Forget what nobody has pulled; return how much it was."""
        count = len(self._finished[purpose])
        self._finished[purpose].clear()
        return count

    def begin_delivery(self, purpose: TaskPurpose, count: int) -> list[Order]:
        """Return up to so many finished orders; they stay here until they are `given`."""
        finished = self._finished[purpose]
        free = [order for number, order in finished.items() if number not in self._delivering][
            :count
        ]
        self._delivering.update(order.number for order in free)
        return free

    def end_delivery(self, orders: list[Order], *, is_delivered: bool) -> None:
        """Note whether all that was lent has arrived; what has not is lent again."""
        for order in orders:
            self._delivering.discard(order.number)
            if is_delivered:
                self._finished[order.purpose].pop(order.number, None)
        self._news.set()

    def has_finished(self, purpose: TaskPurpose) -> bool:
        """Whether something of a purpose has finished and is not lent."""
        return not self._finished[purpose].keys() <= self._delivering

    async def until(self, claim: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until orders make a claim true; return whether they have."""
        try:
            async with asyncio.timeout(timeout_s):
                while not claim():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True


Labels = Mapping[PolicyId, Mapping[int, int]]

_PASSED_ON = ("query_id", "source")


def item_of(order: Order, labels: Labels, policy_ids: Sequence[PolicyId]) -> dict[str, Any]:
    """Return {task_id, result}; the result of one that failed is {ok: False, error}."""
    if not order.rollouts:
        why = f"{order.failure.reason}: {order.failure.message}"
        return {"task_id": order.number, "result": {"ok": False, "error": why}}
    rollouts = [rollout for _, rollout in sorted(order.rollouts.items())]
    fields = order.task.prompt.fields
    metrics = dict.fromkeys(name for each in rollouts for name in each.metrics)
    result: dict[str, Any] = {
        "prompt_id": order.task.prompt.prompt_id,
        "n_trajs": len(rollouts),
        "rewards": np.array([each.reward for each in rollouts], np.float32),
        "trajectories": [
            {
                "sequences": [_sequence(each, labels, policy_ids) for each in rollout.trajectories],
                "stats": dict(rollout.metrics),
            }
            for rollout in rollouts
        ],
        # The mean of every metric over the rollouts that have it.
        "agent_metrics": {
            name: float(np.mean([each.metrics[name] for each in rollouts if name in each.metrics]))
            for name in metrics
        },
    }
    result |= {name: fields[name] for name in _PASSED_ON if name in fields}
    return {"task_id": order.number, "result": result}


def _sequence(
    trajectory: Trajectory, labels: Labels, policy_ids: Sequence[PolicyId]
) -> dict[str, Any]:
    """Return tensors [1, L]; versions are the trainer's own, -1 where nothing was sampled."""
    sampled = trajectory.sampled_mask
    fields: dict[str, Any] = {
        "input_ids": trajectory.tokens.astype(np.int32),
        "loss_mask": sampled.astype(np.int32),
        "logprobs": trajectory.logprobs.astype(np.float32),
        "versions": _labelled(trajectory.versions, labels[trajectory.policy_id]),
        "attention_mask": np.ones(len(sampled), np.bool_),
    }
    if len(policy_ids) > 1:
        number = model_index(trajectory.policy_id, policy_ids)
        fields["model_ids"] = np.where(sampled, number, -1).astype(np.int32)
    rows = {name: values[None, :] for name, values in fields.items()}
    if trajectory.reward is not None:
        rows["rewards"] = np.array([trajectory.reward], np.float32)
    return rows


def _labelled(versions: np.ndarray, labels: Mapping[int, int]) -> np.ndarray:
    found = np.full(len(versions), NOT_SAMPLED, np.int32)
    for version in np.unique(versions):
        if version != NOT_SAMPLED:
            found[versions == version] = labels[int(version)]
    return found
