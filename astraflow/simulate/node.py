"""A simulated node: slots of a speed, rollouts of a length, versions that arrive later, a crash."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import exp, log
from random import Random

import numpy as np

from astraflow.core import effects as ef
from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import MemberId, PolicyId, RolloutId, TaskId, TrajectoryId
from astraflow.core.members import Contract, DirectiveKind, JoinPool, Resources, ServedPolicy
from astraflow.core.rollouts import (
    FinishReason,
    Outcome,
    Rollout,
    SampleFailure,
    TaskResult,
    Trajectory,
    VersionSpan,
)
from astraflow.core.tasks import RegisteredCode, RolloutTask
from astraflow.core.versions import VersionReport, VersionState
from astraflow.simulate.hub import SimulatedHub
from astraflow.simulate.scenario import Pool

POLICY = PolicyId("policy")

# Tokens that one simulated token stands for: nobody reads them.
GRAIN = 100


def draw_lengths(*, mean: float, spread: float, seed: int) -> Iterator[float]:
    """Yield for ever how many tokens rollouts have, at least one, from a log-normal distribution.

    Args:
        mean: Of them.
        spread: Standard deviation of their logarithm.
        seed: Of the draws.
    """
    random = Random(seed)  # noqa: S311 - a simulation, not a secret
    while True:
        yield max(1.0, exp(random.gauss(log(mean) - spread**2 / 2, spread)))


def make_rollout(
    task: RolloutTask, index: int, *, tokens: float, first_version: int, last_version: int
) -> Rollout:
    """Return a scored rollout."""
    name = f"{task.task_id}/{index}"
    count = max(2, round(tokens / GRAIN))
    ids, mask, logprobs = _columns(count)
    trajectory = Trajectory(
        trajectory_id=TrajectoryId(name),
        policy_id=POLICY,
        tokens=ids,
        sampled_mask=mask,
        logprobs=logprobs,
        version_spans=_spans(count, first_version, last_version),
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=RolloutId(name),
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=index,
        outcome=Outcome.SCORED,
        reward=float(index % 2),
        trajectories=(trajectory,),
    )


def make_late(task: RolloutTask, index: int) -> Rollout:
    """Return a rollout that took longer than its timeout, as a node sends it."""
    return Rollout(
        rollout_id=RolloutId(f"{task.task_id}/{index}"),
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=index,
        outcome=Outcome.INFRA_ERROR,
        failure=Failure(reason=Reason.ROLLOUT_TIMEOUT, message="took longer than timeout_s"),
    )


def _spans(count: int, first: int, last: int) -> tuple[VersionSpan, ...]:
    if first == last:
        return (VersionSpan(version=first, length=count),)
    half = count // 2
    return (
        VersionSpan(version=first, length=half),
        VersionSpan(version=last, length=count - half),
    )


@lru_cache(maxsize=4096)
def _columns(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens i32[n + 1], mask bool[n + 1] and log-probabilities f32[n + 1]."""
    mask = np.ones(count + 1, bool)
    mask[0] = False
    return np.zeros(count + 1, np.int32), mask, np.zeros(count + 1, np.float32)


CODE = RegisteredCode(name="simulated")

_CANCELLED = Failure(reason=Reason.TASK_CANCELLED, message="the hub withdrew the task")


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """A task that it holds.

    Attributes:
        open: Samples without a rollout.
        busy_count: Of these, those that have a slot.
    """

    task: RolloutTask
    open: set[int]
    busy_count: int = 0
    sent_count: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedNode:
    """One node, from its join to its end.

    Attributes:
        on_end: Called once when it is gone.
    """

    name: str
    pool: Pool
    hub: SimulatedHub
    lengths: Iterator[float]
    on_end: Callable[["SimulatedNode"], None] = lambda _: None
    is_gone: bool = False
    member_id: MemberId | None = None
    _version: int = -1
    _newest: int = -1
    _is_draining: bool = False
    _busy: int = 0
    _work: dict[TaskId, _Work] = field(default_factory=dict[TaskId, _Work])
    _queue: deque[tuple[TaskId, int]] = field(default_factory=deque[tuple[TaskId, int]])
    _gated: list[RolloutTask] = field(default_factory=list[RolloutTask])

    def join(self) -> None:
        """Join the pool, unless it was given up before; then pull the newest weights."""
        if self.is_gone:
            return
        request = JoinPool(
            name=self.name,
            contract=Contract(),
            capacity=self.pool.slots,
            policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=1 << 20),),
            codes=(CODE,),
            resources=Resources(accelerator="simulated", accelerator_count=1),
        )
        secrets = ev.SessionSecrets(token=b"", transfer_token=b"")
        try:
            membership = self.hub.apply(ev.RaasJoined(request=request, secrets=secrets))
        except AstraflowError as error:
            if error.reason is not Reason.RUN_ENDED:
                raise
            self._end()
            return
        member_id: MemberId = membership.session.member_id
        self.member_id = member_id
        self.hub.workers[member_id] = self
        credit = self.pool.slots + self.pool.queue
        self.hub.apply(ev.TaskCredit(member_id=member_id, max_outstanding=credit))
        known = self.hub.run.listed_versions(POLICY)
        if known:
            self.see(known[-1].version)
        self._after(self.hub.keep_alive_s, self._speak)

    def crash(self) -> None:
        if self.member_id is not None:
            self.hub.workers.pop(self.member_id, None)
        self._end()

    def leave(self) -> None:
        """End the session at once; what it holds goes back."""
        if self.is_gone:
            return
        self._end()
        if self.member_id is not None:
            self.hub.apply(ev.MemberLeft(member_id=self.member_id))

    def drain(self) -> None:
        """Finish what it holds, and leave."""
        self._is_draining = True
        if not self._work:
            self.leave()

    def take(self, task: RolloutTask) -> None:
        """Begin a task as far as slots are free, once the version that it asks for is live."""
        self._work[task.task_id] = _Work(task=task, open=set(task.sample_indexes))
        self._gated.append(task)
        self._admit()

    def cancel(self, effect: ef.SendCancellation) -> None:
        """Stop what is left of a task; its slots are free at once."""
        work = self._work.pop(effect.task_id, None)
        if work is None:
            return
        self._busy -= work.busy_count
        failures = tuple(
            SampleFailure(sample_index=i, failure=_CANCELLED) for i in sorted(work.open)
        )
        self._close(work, failures)
        self._start_samples()

    def order(self, effect: ef.SendDirective) -> None:
        """Drain when asked to; stop when the run is over."""
        if effect.directive.kind is not DirectiveKind.CONTINUE:
            self.drain()

    def see(self, version: int) -> None:
        if version > self._newest:
            self._newest = version
            self._after(self.pool.update_s, partial(self._load, version))

    def _load(self, version: int) -> None:
        if version <= self._version or self.member_id is None:
            return
        self._version = version
        self._admit()
        report = VersionReport(policy_id=POLICY, version=version, state=VersionState.LIVE)
        self._say(ev.VersionReported(member_id=self.member_id, report=report))

    def _speak(self) -> None:
        if self.member_id is not None:
            self._say(ev.MemberKeptAlive(member_id=self.member_id))
            self._after(self.hub.keep_alive_s, self._speak)

    def _admit(self) -> None:
        """Let tasks pass whose version is live."""
        gated, self._gated = self._gated, []
        for task in gated:
            if (task.versions[POLICY].min or 0) > self._version:
                self._gated.append(task)
            else:
                self._queue.extend((task.task_id, index) for index in task.sample_indexes)
        self._start_samples()

    def _start_samples(self) -> None:
        while self._queue and self._busy < self.pool.slots:
            task_id, index = self._queue.popleft()
            work = self._work.get(task_id)
            if work is None:
                continue
            self._busy += 1
            work.busy_count += 1
            tokens, timeout = next(self.lengths), work.task.timeout
            seconds = tokens / self.pool.tokens_per_s
            if timeout is not None and seconds > timeout.total_seconds():
                seconds, tokens = timeout.total_seconds(), None
            done = partial(self._finish, work, index, tokens, self._version)
            self._after(seconds + 2 * self.pool.latency_s, done)

    def _finish(self, work: _Work, index: int, tokens: float | None, first_version: int) -> None:
        """Send what came of a sample; tokens None: it took too long."""
        task = work.task
        if self._work.get(task.task_id) is not work or self.member_id is None:
            # It was withdrawn.
            return
        self._busy -= 1
        work.busy_count -= 1
        work.open.discard(index)
        work.sent_count += 1
        rollout = (
            make_late(task, index)
            if tokens is None
            else make_rollout(
                task,
                index,
                tokens=tokens,
                first_version=first_version,
                last_version=self._version,
            )
        )
        self._say(ev.RolloutArrived(member_id=self.member_id, rollout=rollout))
        if not work.open:
            self._work.pop(task.task_id, None)
            self._close(work, ())
        self._start_samples()

    def _close(self, work: _Work, failures: tuple[SampleFailure, ...]) -> None:
        if self.member_id is None:
            return
        result = TaskResult(
            task_id=work.task.task_id, rollout_count=work.sent_count, failures=failures
        )
        self._say(ev.TaskFinished(member_id=self.member_id, result=result))
        if self._is_draining and not self._work:
            self.leave()

    def _say(self, event: ev.Event) -> None:
        """Send something; a node whose session has ended is gone."""
        if self.is_gone:
            return
        try:
            self.hub.apply(event)
        except AstraflowError as error:
            if error.reason is not Reason.SESSION_ENDED:
                raise
            self._end()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        def alive() -> None:
            if not self.is_gone:
                act()

        self.hub.timeline.after(seconds, alive)

    def _end(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self.on_end(self)
