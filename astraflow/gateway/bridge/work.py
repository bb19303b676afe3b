"""What an HTTP RaaS has of the run: versions brought to it, tasks that end exactly once."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import structlog

from astraflow.client.raas import RaasClient, TaskStream
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, TaskId, WorkflowId
from astraflow.core.tasks import (
    RolloutTask,
    SamplingParams,
    TaskCancellation,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.core.versions import VersionInfo, VersionReport, VersionState
from astraflow.gateway.bridge.calls import RaasCalls, TaskYield, failed, yield_of
from astraflow.gateway.sending import FlatVersions, Sender, SenderOffer
from astraflow.gateway.settings import model_index
from astraflow.rpc.concurrency import beside

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_RETRY_S = 1.0


class VersionSync:
    """Keeps one policy of one RaaS at the newest version.

    While the RaaS loads a version, its sender serves that one and no other: what it labels is what
    it got. It loads nothing whose number is not above that of what it has, and starts at 0 with
    weights of its own: versions are told to it under numbers that only rise, from 1.

    Attributes:
        live: The version that the RaaS samples with; None: none that it is known to have pulled.
        versions: What it pulled: the version of every number that its tokens may have.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        model_id: str,
        flat_versions: FlatVersions,
        sender: Sender,
        endpoint: str,
    ) -> None:
        self.live: int | None = None
        self.moved = asyncio.Condition()
        self.versions: dict[int, int] = {}
        # Numbers: the last that it was told, and the one that `live` has.
        self._told = 0
        self._number: int | None = None
        self._policy_id = policy_id
        self._model_id = model_id
        self._flat_versions = flat_versions
        self._sender = sender
        self._endpoint = endpoint
        self._newest: VersionInfo | None = None
        self._published = asyncio.Event()
        self._is_loading = False
        self._pins: set[TaskId] = set()
        self._free = asyncio.Event()
        self._free.set()

    async def wait_for(self, wanted: VersionRange, *, pin: TaskId | None = None) -> None:
        """Wait until the RaaS has a version that a task may be sampled with.

        Args:
            wanted: By the task.
            pin: A task for which that version stays, until `unpin`; None: it may move on.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is past it.
        """

        def is_reached() -> bool:
            is_still = pin is None or not self._is_loading
            return is_still and self.live is not None and self.live >= (wanted.min or 0)

        async with self.moved:
            await self.moved.wait_for(is_reached)
        if self.live is None or self.live not in wanted:
            raise AstraflowError(
                Reason.VERSION_NOT_SERVED, f"the RaaS is at version {self.live} already"
            )
        if pin is not None:
            self._pins.add(pin)
            self._free.clear()

    def unpin(self, task_id: TaskId) -> None:
        """Let the RaaS move on, where no other task is measured with its version. Idempotent."""
        self._pins.discard(task_id)
        if not self._pins:
            self._free.set()

    async def run(self, client: RaasClient, calls: RaasCalls) -> None:
        """Follow the versions until cancelled."""
        async with beside(self._watch(client)):
            while True:
                await self._published.wait()
                self._published.clear()
                await self._free.wait()
                if self._newest is not None and self._newest.version != self.live:
                    await self._bring(self._newest, client, calls)

    async def _watch(self, client: RaasClient) -> None:
        async for info in client.versions.watch(self._policy_id):
            if self._newest is None or info.version >= self._newest.version:
                self._newest = info
                self._published.set()

    async def _bring(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> None:
        self._is_loading, state, failure = True, VersionState.LIVE, None
        version = info.version
        try:
            version = await self._load(info, client, calls)
        except AstraflowError as error:
            log.warning("an HTTP RaaS did not load a version", version=version, why=str(error))
            state, failure = VersionState.FAILED, error.to_failure()
            asyncio.get_running_loop().call_later(_RETRY_S, self._published.set)
        finally:
            self._is_loading = False
            async with self.moved:
                self.moved.notify_all()
        report = VersionReport(
            policy_id=self._policy_id, version=version, state=state, failure=failure
        )
        await client.versions.report(report)

    async def _load(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> int:
        held = await self._flat_versions.get(
            info,
            lambda: client.versions.versions(self._policy_id),
            client.session.info.transfer_token,
        )
        self._told += 1
        base = self._number if self.live == held.version - 1 else None
        offer = SenderOffer(held=held, number=self._told, base=base)
        self._sender.offer, self._sender.pushed = offer, None
        answer = await calls.notify_version(self._model_id, offer.number, self._endpoint)
        if answer.get("pulled") is False and answer.get("ok"):
            # It has a higher number, of this run or of another: what it samples with is unknown.
            local = re.search(r"local=(\d{1,18})\b", str(answer.get("reason")))
            self.live, self._told = None, int(local[1] if local else 0) or 2 * offer.number
            why = f"had weights of a number above {offer.number}, which nobody can vouch for"
            raise AstraflowError(Reason.APPLY_FAILED, f"{calls.url} {why}; it is told a higher one")
        result = answer.get("pull_result")
        fields = cast("Mapping[str, Any]", result if isinstance(result, dict) else {})
        pulled = fields.get("version")
        if not answer.get("ok") or {self._sender.pushed, pulled} != {offer.number}:
            raise AstraflowError(
                Reason.APPLY_FAILED,
                f"{calls.url} was told of version {held.version} as {offer.number}, got "
                f"{self._sender.pushed} and answers {dict(answer)}",
            )
        self.live, self._number = held.version, offer.number
        self.versions[offer.number] = held.version
        return held.version


_IDLE_S = 0.05

# More than can be on their way at once; the rest is of tasks that nobody holds any more.
_EARLY_COUNT = 1024
_CANCELLED = Failure(reason=Reason.TASK_CANCELLED, message="the run withdrew it")


class HeldTasks:
    """Tasks of training, or of evaluations.

    Attributes:
        busy: Set while the RaaS has one.
        tasks: Those without a result.
    """

    def __init__(self, *, is_eval: bool) -> None:
        self.is_eval = is_eval
        self.busy = asyncio.Event()
        self.tasks: dict[TaskId, RolloutTask] = {}
        self._numbers: dict[int, TaskId] = {}
        # Results that came before the answer to their submission did.
        self._early: OrderedDict[int, Mapping[str, Any]] = OrderedDict()

    @property
    def sample_count(self) -> int:
        return sum(len(task.sample_indexes) for task in self.tasks.values())

    def numbered(self, task_id: TaskId, number: int) -> Mapping[str, Any] | None:
        """Note the RaaS's number of a task; return its result where that came first."""
        self._numbers[number] = task_id
        if task_id in self.tasks:
            self.busy.set()
        return self._early.pop(number, None)

    def take(self, item: Mapping[str, Any]) -> RolloutTask | None:
        """Return the task that an item is the result of; None: nobody waits for it, or not yet."""
        number: int = item["task_id"]
        if number not in self._numbers:
            self._early[number] = item
            if len(self._early) > _EARLY_COUNT:
                self._early.popitem(last=False)
            return None
        return self.tasks.get(self._numbers.pop(number))

    def forget(self, task_id: TaskId) -> None:
        """Remove a task; idempotent."""
        self.tasks.pop(task_id, None)
        if not self.tasks:
            self.busy.clear()


class BridgeWork:
    """Takes tasks of the run to a RaaS, and what comes of them back."""

    def __init__(
        self,
        calls: RaasCalls,
        client: RaasClient,
        syncs: Mapping[PolicyId, VersionSync],
        workflows: Sequence[WorkflowSpec],
    ) -> None:
        self.stream: TaskStream | None = None
        self._calls = calls
        self._client = client
        self._syncs = syncs
        self._workflows: Mapping[WorkflowId, WorkflowSpec] = {w.workflow_id: w for w in workflows}
        self._training = HeldTasks(is_eval=False)
        self._evals = HeldTasks(is_eval=True)
        self._registered: dict[tuple[WorkflowId, int, SamplingParams], str] = {}
        self._registering = asyncio.Lock()
        self._measures = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def held(self) -> tuple[TaskId, ...]:
        """Tasks without a result that the run has acknowledged."""
        unacked = self._client.rollouts.unacked_results
        return (*self._training.tasks, *self._evals.tasks, *unacked)

    @property
    def sample_count(self) -> int:
        return self.train_sample_count + self._evals.sample_count

    @property
    def train_sample_count(self) -> int:
        """Samples of those that are trained on."""
        return self._training.sample_count

    def take(self, task: RolloutTask) -> None:
        """Begin a task."""
        held = self._evals if task.purpose is TaskPurpose.EVAL else self._training
        if task.task_id not in held.tasks:
            held.tasks[task.task_id] = task
            self.idle.clear()
            self._group.create_task(self._submit(task, held))

    def cancel(self, cancellation: TaskCancellation) -> None:
        """End a task that is not wanted: the RaaS cannot be told, its result is dropped.

        Nobody knows whether it will have one: what it answers to a pull that is cut is lost.
        """
        if cancellation.sample_indexes:
            return
        for held in (self._training, self._evals):
            task = held.tasks.get(cancellation.task_id)
            if task is not None:
                self._close(failed(task, _CANCELLED), held)

    def keep(self, task_ids: Sequence[TaskId]) -> None:
        """Forget what is no longer this member's own."""
        for held in (self._training, self._evals):
            for task_id in held.tasks.keys() - set(task_ids):
                self._forget(task_id, held)

    async def run(self) -> None:
        """Submit what was taken, and bring back what has finished, until cancelled."""
        async with beside(self._pull(self._training)) as self._group:
            await self._pull(self._evals)

    async def _pull(self, held: HeldTasks) -> None:
        """Ask again and again; a RaaS that is away is asked again too."""
        while True:
            await held.busy.wait()
            try:
                items = await self._calls.pull(is_eval=held.is_eval)
                for item in items:
                    self._return(item, held)
                if held is self._evals and not held.tasks:
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
            if self.stream is not None and task.task_id in held.tasks:
                self.stream.nack(task.task_id, error.to_failure())
            self._forget(task.task_id, held)
            return
        early = None if number is None else held.numbered(task.task_id, number)
        if early is not None:
            self._return(early, held)

    async def _submitted(self, task: RolloutTask, held: HeldTasks) -> int | None:
        """Have the RaaS begin a task with a version that it may have.

        Returns:
            The RaaS's number of it; None: it was withdrawn while it waited for the version.
        """
        spec = self._workflows[task.workflow_id]
        for policy_id in spec.policy_ids:
            wanted = task.versions.get(policy_id, VersionRange())
            pin = task.task_id if held.is_eval else None
            await self._syncs[policy_id].wait_for(wanted, pin=pin)
        if task.task_id not in held.tasks:
            # Its pin came after it was forgotten.
            self._forget(task.task_id, held)
            return None
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
        policy_ids = self._workflows[task.workflow_id].policy_ids
        models = {
            model_index(each, tuple(self._syncs)): (each, self._syncs[each].versions)
            for each in policy_ids
        }
        if len(self._syncs) == 1:
            # Whatever its name: a RaaS of one model counts it from 0.
            models.setdefault(0, *models.values())
        self._close(yield_of(task, item, models), held)

    def _close(self, came: TaskYield, held: HeldTasks) -> None:
        rollouts, result = came
        for rollout in rollouts:
            self._client.rollouts.send(rollout)
        self._client.rollouts.close_task(result)
        self._forget(result.task_id, held)

    def _forget(self, task_id: TaskId, held: HeldTasks) -> None:
        held.forget(task_id)
        for sync in self._syncs.values():
            sync.unpin(task_id)
        if not self._training.tasks and not self._evals.tasks:
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
