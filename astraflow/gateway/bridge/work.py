"""The tasks of an HTTP RaaS: submitted, pulled, returned; each ends exactly once."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from astraflow.client.raas import RaasClient, TaskStream
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, TaskId, WorkflowId
from astraflow.core.rollouts import TaskResult
from astraflow.core.tasks import (
    RolloutTask,
    SamplingParams,
    TaskCancellation,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.gateway.bridge.calls import RaasCalls
from astraflow.gateway.bridge.results import failed, yield_of
from astraflow.gateway.bridge.versions import VersionCourier
from astraflow.rpc.concurrency import beside

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_IDLE_S = 0.05
# More than can be on their way at once; the rest is of tasks that nobody holds any more.
_EARLY_COUNT = 1024
_CANCELLED = Failure(reason=Reason.TASK_CANCELLED, message="the run withdrew it")


class HeldTasks:
    """Tasks of training, or of evaluations.

    Attributes:
        is_eval: Which of the two.
        busy: Set while there is one that the RaaS has.
    """

    def __init__(self, *, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.busy = asyncio.Event()
        self._tasks: dict[TaskId, RolloutTask] = {}
        self._numbers: dict[int, TaskId] = {}
        # Results that came before the answer to their submission did.
        self._early: OrderedDict[int, Mapping[str, Any]] = OrderedDict()

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._tasks

    @property
    def task_ids(self) -> tuple[TaskId, ...]:
        """Tasks without a result."""
        return tuple(self._tasks)

    @property
    def sample_count(self) -> int:
        """Samples of them."""
        return sum(len(task.sample_indexes) for task in self._tasks.values())

    def put(self, task: RolloutTask) -> None:
        """Add a task that the RaaS is about to get."""
        self._tasks[task.task_id] = task

    def numbered(self, task_id: TaskId, number: int) -> Mapping[str, Any] | None:
        """Note the RaaS's number of a task; return its result where that came first."""
        self._numbers[number] = task_id
        if task_id in self._tasks:
            self.busy.set()
        return self._early.pop(number, None)

    def take(self, item: Mapping[str, Any]) -> RolloutTask | None:
        """Return the task that an item is the result of; None: nobody waits for it, or not yet."""
        number = int(item["task_id"])
        if number not in self._numbers:
            self._early[number] = item
            if len(self._early) > _EARLY_COUNT:
                self._early.popitem(last=False)
            return None
        return self._tasks.get(self._numbers.pop(number))

    def forget(self, task_id: TaskId) -> None:
        """Remove a task; idempotent."""
        self._tasks.pop(task_id, None)
        if not self._tasks:
            self.busy.clear()

    def others(self, task_ids: Collection[TaskId]) -> list[TaskId]:
        """Return its tasks that are none of these."""
        return [task_id for task_id in self._tasks if task_id not in task_ids]


class BridgeWork:
    """Takes tasks of the run to a RaaS, and what comes of them back."""

    def __init__(
        self,
        calls: RaasCalls,
        client: RaasClient,
        couriers: Mapping[PolicyId, VersionCourier],
        workflows: Sequence[WorkflowSpec],
        group: asyncio.TaskGroup,
    ) -> None:
        self.stream: TaskStream | None = None
        self._calls = calls
        self._client = client
        self._couriers = couriers
        self._workflows: Mapping[WorkflowId, WorkflowSpec] = {w.workflow_id: w for w in workflows}
        self._group = group
        self._training = HeldTasks(is_eval=False)
        self._evals = HeldTasks(is_eval=True)
        self._cancelled: set[TaskId] = set()
        self._registered: dict[tuple[WorkflowId, int, SamplingParams], str] = {}
        self._registering = asyncio.Lock()
        self._measures = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def held(self) -> tuple[TaskId, ...]:
        """Tasks without a result."""
        return (*self._training.task_ids, *self._evals.task_ids)

    @property
    def sample_count(self) -> int:
        """Samples of them."""
        return self.train_sample_count + self._evals.sample_count

    @property
    def train_sample_count(self) -> int:
        """Samples of those that are trained on."""
        return self._training.sample_count

    def take(self, task: RolloutTask) -> None:
        """Begin a task."""
        held = self._evals if task.purpose is TaskPurpose.EVAL else self._training
        if task.task_id not in held:
            held.put(task)
            self.idle.clear()
            self._group.create_task(self._submit(task, held))

    def cancel(self, cancellation: TaskCancellation) -> None:
        """Note that a task is not wanted: the RaaS cannot be told, its result is dropped."""
        if not cancellation.sample_indexes:
            self._cancelled.add(cancellation.task_id)

    def keep(self, task_ids: Sequence[TaskId]) -> None:
        """Forget what is no longer this member's own."""
        for held in (self._training, self._evals):
            for task_id in held.others(task_ids):
                self._forget(task_id, held)

    async def pull(self) -> None:
        """Bring back what has finished, until cancelled."""
        async with beside(self._pull(self._training)):
            await self._pull(self._evals)

    async def _pull(self, held: HeldTasks) -> None:
        """Ask again and again; a RaaS that is away is asked again too."""
        while True:
            await held.busy.wait()
            try:
                items = await self._calls.pull(is_eval=held.is_eval)
                for item in items:
                    self._return(item, held)
                if held is self._evals and not held.task_ids:
                    await self._measure(are_on=False)
            except AstraflowError as error:
                log.warning("an HTTP RaaS gave no results", why=str(error))
                items = []
            if not items:
                await asyncio.sleep(_IDLE_S)

    async def _submit(self, task: RolloutTask, held: HeldTasks) -> None:
        try:
            number = await self._submitted(task, held)
        except AstraflowError as error:
            self._give_back(task, error.to_failure(), held)
            return
        early = held.numbered(task.task_id, number)
        if early is not None:
            self._return(early, held)

    async def _submitted(self, task: RolloutTask, held: HeldTasks) -> int:
        """Have the RaaS begin a task with a version that it may have; return its number of it."""
        spec = self._workflows[task.workflow_id]
        for policy_id in spec.policy_ids:
            wanted = task.versions.get(policy_id, VersionRange())
            pin = task.task_id if held.is_eval else None
            await self._couriers[policy_id].reach(wanted, pin=pin)
        if held.is_eval:
            await self._measure(are_on=True)
        workflow_id = await self._workflow(spec, task)
        data = {**task.prompt.fields, "prompt_id": task.prompt.prompt_id}
        return await self._calls.submit(data, workflow_id, is_eval=held.is_eval)

    async def _measure(self, *, are_on: bool) -> None:
        """Tell the RaaS that evaluations begin or have ended, once each."""
        if are_on is not self._measures:
            self._measures = are_on
            await self._calls.mark_evals(are_on=are_on)

    async def _workflow(self, spec: WorkflowSpec, task: RolloutTask) -> str:
        """Return the RaaS's name of a workflow with these samples and sampling."""
        count, sampling = len(task.sample_indexes), task.sampling[spec.policy_ids[0]]
        key = (spec.workflow_id, count, sampling)
        async with self._registering:
            if key not in self._registered:
                name = f"{spec.workflow_id}-{len(self._registered)}"
                await self._calls.register_workflow(_registration(name, spec, count, sampling))
                self._registered[key] = name
        return self._registered[key]

    def _return(self, item: Mapping[str, Any], held: HeldTasks) -> None:
        task = held.take(item)
        if task is None:
            return
        policies = self._workflows[task.workflow_id].policy_ids
        versions = {policy_id: self._couriers[policy_id].versions for policy_id in policies}
        is_wanted = task.task_id not in self._cancelled
        came = yield_of(task, item, versions) if is_wanted else failed(task, _CANCELLED)
        for rollout in came.rollouts:
            self._client.rollouts.send(rollout)
        self._client.rollouts.close_task(
            TaskResult(
                task_id=task.task_id, rollout_count=len(came.rollouts), failures=came.failures
            )
        )
        self._forget(task.task_id, held)

    def _give_back(self, task: RolloutTask, failure: Failure, held: HeldTasks) -> None:
        if self.stream is not None and task.task_id in held:
            self.stream.nack(task.task_id, failure)
        self._forget(task.task_id, held)

    def _forget(self, task_id: TaskId, held: HeldTasks) -> None:
        held.forget(task_id)
        self._cancelled.discard(task_id)
        for courier in self._couriers.values():
            courier.unpin(task_id)
        if not self.held:
            self.idle.set()


def _registration(
    name: str, spec: WorkflowSpec, count: int, sampling: SamplingParams
) -> dict[str, Any]:
    known = asdict(sampling)
    names = ("temperature", "top_p", "max_new_tokens", "min_new_tokens", "ignore_eos")
    overrides = {each: known[each] for each in names} | {"n_samples": count}
    if sampling.top_k is not None:
        overrides["top_k"] = sampling.top_k
    if sampling.stop_strings:
        overrides["stop"] = list(sampling.stop_strings)
    fields: dict[str, Any] = {
        "workflow_id": name,
        "workflow_cls": spec.code.name,
        "gconfig_overrides": overrides,
        "workflow_kwargs": {**spec.options, **spec.scorer_options},
    }
    return fields if spec.scorer is None else {**fields, "reward_fn": spec.scorer.name}
