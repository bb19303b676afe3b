"""Episodes: every sample of every task is an asyncio task; each task ends exactly once."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from math import ceil
from typing import Final, Protocol

import structlog

from astraflow.client.payloads import PayloadWriter
from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, TaskId, WorkflowId
from astraflow.core.rollouts import Rollout, SampleFailure, TaskResult
from astraflow.core.tasks import RolloutTask, TaskCancellation, TaskPurpose
from astraflow.raas.failures import NodeFailureLog
from astraflow.raas.metrics import NodeCounters, node_families
from astraflow.raas.policies import ServedPolicies
from astraflow.telemetry.metrics import Family
from astraflow.telemetry.tracebacks import place_of_definition
from astraflow.workflows.agents.session import AgentServer
from astraflow.workflows.episode import Episode
from astraflow.workflows.runner import LoadedWorkflow, run_episode

# Of the newest episode in the mean.
_WEIGHT: Final = 1 / 16

_TASKS: Final = 32


class EpisodeTimes:
    """How long episodes take and how many samples tasks have, lately.

    Attributes:
        mean_s: Seconds per episode; 0: none has ended.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._sizes = deque[int](maxlen=_TASKS)

    def note_episode(self, seconds: float) -> None:
        """Count one episode."""
        weight = _WEIGHT if self.mean_s else 1.0
        self.mean_s += weight * (seconds - self.mean_s)

    def note_task(self, sample_count: int) -> None:
        """Count one task."""
        self._sizes.append(sample_count)

    @property
    def task_size(self) -> int:
        """Samples of the largest of the last tasks, at least 1."""
        return max(self._sizes, default=1)


def headroom(*, capacity: int, round_trip_s: float, episode_s: float, task_size: int) -> int:
    """Return how many samples to ask for beyond the capacity.

    In one round trip to the hub `capacity * round_trip_s / episode_s` episodes end; so many have to
    lie ready, in whole tasks. At most as many as run; none when it is less than half a sample.

    Example:
        16 at once, 0.3 s there and back, 0.8 s per episode: 6 end meanwhile. Tasks have 8 samples:
        8 more are asked for. With 1 ms there and back: none.
    """
    ending = capacity * round_trip_s / episode_s if episode_s > 0 else 0.0
    if ending < 0.5:
        return 0
    return min(capacity, ceil(ending / task_size) * task_size)


CANCELLED = Failure(reason=Reason.TASK_CANCELLED, message="the run withdrew it")

OVERDUE = Failure(reason=Reason.TASK_CANCELLED, message="the deadline of its task passed")


@dataclass(slots=True, kw_only=True, eq=False)
class HeldTask:
    """A task from its arrival to its result.

    Attributes:
        task: As it came.
        starting: Waits for its versions, then for its end.
        episodes: Begun, by sample index.
        waiting: Samples whose episode waits its turn.
        withdrawn: Samples that the run wants no more, before any episode was begun.
        sent_count: Rollouts sent.
        failures: Of the other samples.
        is_disowned: Whether it is no longer this node's own; no result is due.
        why: What samples that are stopped fail with.
        overdue: Rings at the deadline; None: there is none.
        over: Set at its end.
    """

    task: RolloutTask
    starting: "asyncio.Task[None] | None" = None
    episodes: "dict[int, asyncio.Task[Rollout]]" = field(
        default_factory=dict[int, "asyncio.Task[Rollout]"]
    )
    waiting: set[int] = field(default_factory=set[int])
    withdrawn: set[int] = field(default_factory=set[int])
    sent_count: int = 0
    failures: list[SampleFailure] = field(default_factory=list[SampleFailure])
    is_disowned: bool = False
    why: Failure = CANCELLED
    overdue: asyncio.TimerHandle | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_started(self) -> bool:
        """Whether an episode of it was begun."""
        return bool(self.episodes)

    @property
    def queued_count(self) -> int:
        """Samples that wait for a version or their turn."""
        return len(self.waiting) if self.is_started else len(self.task.sample_indexes)

    @property
    def result(self) -> TaskResult:
        """What is sent at its end."""
        return TaskResult(
            task_id=self.task.task_id,
            rollout_count=self.sent_count,
            failures=tuple(self.failures),
        )

    def fail(self, index: int, failure: Failure) -> None:
        """Note that no rollout comes of a sample."""
        self.failures.append(SampleFailure(sample_index=index, failure=failure))

    def fail_withdrawn(self) -> None:
        """Note the same of what was withdrawn before it began."""
        for index in self.withdrawn.intersection(self.task.sample_indexes):
            self.fail(index, self.why)

    def cancel(self, indexes: Iterable[int]) -> None:
        """Stop episodes; those of other indexes go on."""
        for index in self.episodes.keys() & set(indexes):
            self.episodes[index].cancel()

    def end(self) -> None:
        """Let go of the versions that it holds, or waits for."""
        self.over.set()
        if self.overdue is not None:
            self.overdue.cancel()
        if self.starting is not None and not self.is_started:
            self.starting.cancel()


class Places:
    """Places of episodes; whoever finds none waits his turn.

    Example:
        40 places and 4 for evaluations: an evaluation takes one of the 4, and one of the 40 when
        these are taken. Training has 40 in any case that no more than 4 are evaluated.
    """

    def __init__(self, *, capacity: int, eval_extra: int = 0) -> None:
        """Have all of them free; `eval_extra` are for evaluations alone."""
        self._any = asyncio.Semaphore(capacity)
        self._eval = asyncio.Semaphore(eval_extra)

    def of(self, purpose: TaskPurpose) -> asyncio.Semaphore:
        """Return what an episode that begins now has to hold."""
        is_own = purpose is TaskPurpose.EVAL and not self._eval.locked()
        return self._eval if is_own else self._any


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Results(Protocol):
    """Where the results of tasks go."""

    def send(self, rollout: Rollout) -> bool:
        """Send a rollout; False: it is larger than the run reads."""
        ...

    def close_task(self, result: TaskResult) -> None:
        """Send the result of a task."""
        ...


_DRAINING = Failure(
    reason=Reason.MEMBER_DRAINING, message="the node leaves; not started", retryable=True
)

_NO_WORKFLOW = Failure(
    reason=Reason.CODE_UNKNOWN, message="the run named no such workflow when the node joined"
)


class EpisodeRunner:
    """Runs tasks until all of them are done or were given back.

    Attributes:
        counters: What it counts, beside others of its node.
    """

    # `start` sets them.
    _group: asyncio.TaskGroup
    _workflows: Mapping[WorkflowId, LoadedWorkflow]
    _results: Results
    _give_back: Callable[[TaskId, Failure], None]
    _run_time: Callable[[], datetime | None]
    _payloads: PayloadWriter | None

    def __init__(
        self,
        policies: ServedPolicies,
        *,
        capacity: int,
        eval_extra: int,
        agents: AgentServer,
    ) -> None:
        """Begin with nothing; `start` comes before the first task.

        Args:
            policies: Versions and engines.
            capacity: Episodes at once; more wait their turn.
            eval_extra: Of evaluations, beyond it.
            agents: Lets agents in.
        """
        self.times = EpisodeTimes()
        self.counters = NodeCounters()
        self._capacity = capacity
        self._places = Places(capacity=capacity, eval_extra=eval_extra)
        self._clock = SystemClock()
        self._policies = policies
        self._agents = agents
        self._notes = NodeFailureLog()
        self._held: dict[TaskId, HeldTask] = {}
        self._running_count = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def start(
        self,
        group: asyncio.TaskGroup,
        workflows: Mapping[WorkflowId, LoadedWorkflow],
        *,
        results: Results,
        give_back: Callable[[TaskId, Failure], None],
        run_time: Callable[[], datetime | None] = lambda: None,
        payloads: PayloadWriter | None = None,
    ) -> None:
        """Be ready for tasks.

        Args:
            group: Runs the episodes.
            workflows: Of the run.
            results: Where results go.
            give_back: Where tasks go that were not started.
            run_time: Tells the time by the run's clock, which deadlines are of; None: it is not
                known yet, and the run withdraws by itself what comes too late.
            payloads: Takes the arrays of large trajectories; None: they go with the rollouts.
        """
        self._group, self._workflows = group, workflows
        self._results, self._give_back = results, give_back
        self._run_time, self._payloads = run_time, payloads

    def families(self) -> tuple[Family, ...]:
        """Return the metrics of the node as it is; on its event loop."""
        models = self._policies.models
        return tuple(
            node_families(
                {policy_id: model.engine for policy_id, model in models.items()},
                self.counters,
                running_count=self.running_count,
                queued_count=self.queued_count,
                capacity=self._capacity,
            )
        )

    @property
    def held(self) -> tuple[TaskId, ...]:
        """Tasks without a result."""
        return tuple(self._held)

    @property
    def running_count(self) -> int:
        """Episodes in progress."""
        return self._running_count

    @property
    def queued_count(self) -> int:
        """Samples that wait for a version or their turn."""
        return sum(held.queued_count for held in self._held.values())

    def take(self, task: RolloutTask) -> None:
        """Begin a task, or wait for its version first."""
        if self._is_draining:
            self._give_back(task.task_id, _DRAINING)
            return
        if task.task_id in self._held:
            return
        held = HeldTask(task=task)
        self.times.note_task(len(task.sample_indexes))
        self._held[task.task_id] = held
        self._idle.clear()
        held.starting = self._group.create_task(self._run(held))
        now = self._run_time()
        if task.deadline is not None and now is not None:
            left_s = (task.deadline - now).total_seconds()
            loop = asyncio.get_running_loop()
            held.overdue = loop.call_later(left_s, self._give_up, held)

    def cancel(self, cancellation: TaskCancellation) -> None:
        """Withdraw samples; what they were asked for ends as a failure, the result still comes."""
        held = self._held.get(cancellation.task_id)
        if held is None:
            return
        log.debug("task withdrawn", task_id=cancellation.task_id, why=cancellation.reason)
        self._withdraw(held, cancellation.sample_indexes or held.task.sample_indexes)

    def _give_up(self, held: HeldTask) -> None:
        """Stop what is left of a task at its deadline; its result still comes."""
        log.info("the deadline of a task passed", task_id=held.task.task_id)
        held.why = OVERDUE
        self._withdraw(held, held.task.sample_indexes)

    def _withdraw(self, held: HeldTask, withdrawn: Iterable[int]) -> None:
        if held.is_started:
            held.cancel(withdrawn)
            return
        held.withdrawn.update(withdrawn)
        if held.withdrawn.issuperset(held.task.sample_indexes):
            held.fail_withdrawn()
            self._close_done(held)

    def keep(self, task_ids: tuple[TaskId, ...]) -> None:
        """Stop what is no longer this node's own; no result of it is due."""
        for task_id in self._held.keys() - set(task_ids):
            self._disown(self._held[task_id])

    def drain(self) -> None:
        """Give back what was not started; what runs goes on."""
        self._is_draining = True
        for held in tuple(self._held.values()):
            if not held.is_started:
                self._return(held, _DRAINING)
            held.cancel(held.waiting)

    def stop(self) -> None:
        """Abandon everything; no result is due any more."""
        self._is_draining = True
        for held in tuple(self._held.values()):
            self._disown(held)

    async def idle(self) -> None:
        """Wait until nothing is held."""
        await self._idle.wait()

    async def _run(self, held: HeldTask) -> None:
        """Hold the versions of a task from its start to its end."""
        workflow = self._workflows.get(held.task.workflow_id)
        if workflow is None:
            self._return(held, _NO_WORKFLOW)
            return
        try:
            pinned = await self._policies.admit(held.task, workflow.policy_ids)
        except AstraflowError as error:
            self._return(held, error.to_failure())
            return
        try:
            self._begin(held, workflow, pinned)
            await held.over.wait()
        finally:
            await self._policies.dismiss(pinned)

    def _begin(
        self, held: HeldTask, loaded: LoadedWorkflow, pinned: Mapping[PolicyId, int | None]
    ) -> None:
        task = held.task
        for index in task.sample_indexes:
            if index in held.withdrawn:
                continue
            ports = self._policies.ports(task, index, pinned)
            episode = Episode(
                task=task, sample_index=index, policies=ports, agent_server=self._agents
            )
            held.waiting.add(index)
            running = self._group.create_task(self._run_in_turn(held, index, loaded, episode))
            held.episodes[index] = running
            running.add_done_callback(partial(self._ended, held, index))
        held.fail_withdrawn()
        self._close_done(held)

    async def _run_in_turn(
        self, held: HeldTask, index: int, loaded: LoadedWorkflow, episode: Episode
    ) -> Rollout:
        async with self._places.of(held.task.purpose):
            held.waiting.discard(index)
            self._running_count += 1
            started = self._clock.monotonic()
            try:
                rollout = await run_episode(loaded, episode)
            finally:
                self._running_count -= 1
                self.times.note_episode(self._clock.monotonic() - started)
        return rollout if self._payloads is None else await self._payloads.put(rollout)

    def _ended(self, held: HeldTask, index: int, running: "asyncio.Task[Rollout]") -> None:
        """Send what came of an episode, and the result of its task after the last one."""
        held.waiting.discard(index)
        if running.cancelled() or held.is_disowned:
            held.fail(index, held.why)
        elif (error := running.exception()) is not None:
            # The group ends with this error; the sample says so as long as there is a stream.
            is_ours = isinstance(error, AstraflowError)
            failure = Failure(reason=Reason.INTERNAL, message=repr(error))
            held.fail(index, self._notes.record(error.to_failure() if is_ours else failure))
        else:
            self._send(held, index, running.result())
        self._close_done(held)

    def _send(self, held: HeldTask, index: int, rollout: Rollout) -> None:
        if rollout.failure is not None:
            rollout = replace(rollout, failure=self._notes.record(rollout.failure))
        if self._results.send(rollout):
            held.sent_count += 1
            self.counters.sent(rollout)
        else:
            held.fail(index, self._notes.record(self._too_large(held, rollout)))

    def _too_large(self, held: HeldTask, rollout: Rollout) -> Failure:
        """Say what of a rollout is more than the run reads, and whose code made it."""
        token_count = sum(each.token_count for each in rollout.trajectories)
        message = (
            f"the rollout is larger than the run reads: {len(rollout.trajectories)} trajectories "
            f"of {token_count:,} tokens, {len(rollout.reward_parts):,} parts of its reward and "
            f"{len(rollout.metrics):,} metrics; ask for fewer or shorter turns, return less"
        )
        run = self._workflows[held.task.workflow_id].workflow.run
        place = place_of_definition(run, name="TooLarge", said=message)
        return Failure(
            reason=Reason.MESSAGE_TOO_LARGE,
            message=message,
            cause=place.cause,
            traceback=place.traceback,
        )

    def _close_done(self, held: HeldTask) -> None:
        """Send the result of a task once every sample has a rollout or a failure."""
        if held.sent_count + len(held.failures) < len(held.task.sample_indexes):
            return
        if not held.is_disowned:
            self._results.close_task(held.result)
        self._forget(held)

    def _return(self, held: HeldTask, failure: Failure) -> None:
        """Give back a task that was not started."""
        self._give_back(held.task.task_id, failure)
        self._forget(held)

    def _disown(self, held: HeldTask) -> None:
        held.is_disowned = True
        if not held.is_started:
            self._forget(held)
        held.cancel(held.episodes)

    def _forget(self, held: HeldTask) -> None:
        self._held.pop(held.task.task_id, None)
        held.end()
        if not self._held:
            self._idle.set()
