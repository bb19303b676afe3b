"""The tasks of an HTTP RaaS: submitted, pulled, returned; each ends exactly once."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from astraflow.client.raas import RaasClient
from astraflow.client.task_stream import TaskStream
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, TaskId, WorkflowId
from astraflow.core.rollouts import TaskResult
from astraflow.core.tasks import (
    RolloutTask,
    SamplingParams,
    TaskCancellation,
    VersionRange,
    WorkflowSpec,
)
from astraflow.gateway.bridge.calls import RaasCalls
from astraflow.gateway.bridge.results import failed, yield_of
from astraflow.gateway.bridge.versions import VersionCourier

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_IDLE_S = 0.05
# More than can be on their way at once; the rest is of tasks that nobody holds any more.
_EARLY_COUNT = 1024
_CANCELLED = Failure(reason=Reason.TASK_CANCELLED, message="the run withdrew it")


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
        """Begin with nothing.

        Args:
            calls: The RaaS.
            client: Its place in the run.
            couriers: Of its versions.
            workflows: Of the run.
            group: Runs what is begun.
        """
        self.stream: TaskStream | None = None
        self._calls = calls
        self._client = client
        self._couriers = couriers
        self._workflows: Mapping[WorkflowId, WorkflowSpec] = {w.workflow_id: w for w in workflows}
        self._group = group
        self._held: dict[TaskId, RolloutTask] = {}
        self._numbers: dict[int, TaskId] = {}
        # Results that came before the answer to their /submit did.
        self._early: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._cancelled: set[TaskId] = set()
        self._registered: dict[tuple[WorkflowId, int, SamplingParams], str] = {}
        self._busy = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def held(self) -> tuple[TaskId, ...]:
        """Tasks without a result."""
        return tuple(self._held)

    @property
    def sample_count(self) -> int:
        """Samples of them."""
        return sum(len(task.sample_indexes) for task in self._held.values())

    def take(self, task: RolloutTask) -> None:
        """Begin a task."""
        if task.task_id not in self._held:
            self._held[task.task_id] = task
            self.idle.clear()
            self._group.create_task(self._submit(task))

    def cancel(self, cancellation: TaskCancellation) -> None:
        """Note that a task is not wanted: the RaaS cannot be told, its result is dropped."""
        if not cancellation.sample_indexes:
            self._cancelled.add(cancellation.task_id)

    def keep(self, task_ids: Sequence[TaskId]) -> None:
        """Forget what is no longer this member's own."""
        for task_id in self._held.keys() - set(task_ids):
            self._forget(task_id)

    async def pull(self) -> None:
        """Bring back what has finished, until cancelled; a RaaS that is away is asked again."""
        while True:
            await self._busy.wait()
            try:
                items = await self._calls.pull()
            except AstraflowError as error:
                log.warning("an HTTP RaaS gave no results", why=str(error))
                items = []
            for item in items:
                self._return(item)
            if not items:
                await asyncio.sleep(_IDLE_S)

    async def _submit(self, task: RolloutTask) -> None:
        try:
            spec = self._workflows[task.workflow_id]
            for policy_id in spec.policy_ids:
                wanted = task.versions.get(policy_id, VersionRange())
                await _reached(self._couriers[policy_id], wanted)
            workflow_id = await self._workflow(spec, task)
            data = {**task.prompt.fields, "prompt_id": task.prompt.prompt_id}
            number = await self._calls.submit(data, workflow_id)
        except AstraflowError as error:
            self._give_back(task, error.to_failure())
            return
        self._numbers[number] = task.task_id
        if number in self._early:
            self._return(self._early.pop(number))
        elif task.task_id in self._held:
            self._busy.set()

    async def _workflow(self, spec: WorkflowSpec, task: RolloutTask) -> str:
        """Return the RaaS's name of a workflow with these samples and sampling."""
        count, sampling = len(task.sample_indexes), task.sampling[spec.policy_ids[0]]
        key = (spec.workflow_id, count, sampling)
        if key not in self._registered:
            name = f"{spec.workflow_id}-{len(self._registered)}"
            await self._calls.register_workflow(_registration(name, spec, count, sampling))
            self._registered[key] = name
        return self._registered[key]

    def _return(self, item: Mapping[str, Any]) -> None:
        number = int(item["task_id"])
        if number not in self._numbers:
            self._early[number] = item
            if len(self._early) > _EARLY_COUNT:
                self._early.popitem(last=False)
            return
        task = self._held.get(self._numbers.pop(number))
        if task is None:
            return
        policies = self._workflows[task.workflow_id].policy_ids
        is_wanted = task.task_id not in self._cancelled
        came = yield_of(task, item, policies) if is_wanted else failed(task, _CANCELLED)
        for rollout in came.rollouts:
            self._client.rollouts.send(rollout)
        self._client.rollouts.close_task(
            TaskResult(
                task_id=task.task_id, rollout_count=len(came.rollouts), failures=came.failures
            )
        )
        self._forget(task.task_id)

    def _give_back(self, task: RolloutTask, failure: Failure) -> None:
        if self.stream is not None and task.task_id in self._held:
            self.stream.nack(task.task_id, failure)
        self._forget(task.task_id)

    def _forget(self, task_id: TaskId) -> None:
        self._held.pop(task_id, None)
        self._cancelled.discard(task_id)
        if not self._held:
            self._busy.clear()
            self.idle.set()


async def _reached(courier: VersionCourier, wanted: VersionRange) -> None:
    """Wait until the RaaS has a version that a task may be sampled with.

    Raises:
        AstraflowError: VERSION_NOT_SERVED when it is past it.
    """
    async with courier.moved:
        await courier.moved.wait_for(
            lambda: courier.live is not None and courier.live >= (wanted.min or 0)
        )
    if courier.live is None or courier.live not in wanted:
        raise AstraflowError(
            Reason.VERSION_NOT_SERVED, f"the RaaS is at version {courier.live} already"
        )


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
