"""Evaluation: pinned versions are measured on a share of the pool, beside training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from astraflow.core.effects import DrawEvalPrompts, Effects, EvalChanged
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evals import EvalRun, EvalState
from astraflow.core.events import EvalCreated, EvalPromptsOffered
from astraflow.core.groups import EvalGroup
from astraflow.core.ids import EvalRunId, IdGenerator, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState, find_policy, newest_versions
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.pool.sessions import Sessions
from astraflow.core.rollouts import Rollout
from astraflow.core.settings import RunSettings, SuiteSettings
from astraflow.core.tasks import CancelReason, VersionRange
from astraflow.core.work.eval_work import EvalWork
from astraflow.core.work.scheduler import (
    MemberCapacity,
    PlacementRequest,
    PoolView,
    choose,
    eval_capacity,
    may_serve_pinned,
)
from astraflow.core.work.task_table import TaskTable


def not_served(versions: Mapping[PolicyId, int]) -> Failure:
    """Return why an evaluation cannot go on."""
    names = ", ".join(f"{policy_id} {version}" for policy_id, version in versions.items())
    return Failure(
        reason=Reason.VERSION_NOT_SERVED,
        message=f"no RaaS serves version {names} any more, nor has kept it",
    )


# Finished evaluations, and requests, that can still be asked for.
_KEPT_COUNT = 256


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluation:
    """All evaluations of a run: those that somebody asked for, and those of the recipe.

    Attributes:
        active: Those that are not final.
        has_pool: Whether they have the whole pool: training is over.
    """

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    tasks: TaskTable
    ids: IdGenerator
    lifecycle: RunLifecycle
    effects: Effects
    active: dict[EvalRunId, EvalWork] = field(init=False, default_factory=dict[EvalRunId, EvalWork])
    _finished: dict[EvalRunId, EvalRun] = field(
        init=False, default_factory=dict[EvalRunId, EvalRun]
    )
    _requests: dict[str, tuple[EvalRunId, EvalCreated]] = field(
        init=False, default_factory=dict[str, tuple[EvalRunId, EvalCreated]]
    )
    _begun_suites: set[str] = field(init=False, default_factory=set[str])
    _is_last_begun: bool = field(init=False, default=False)
    has_pool: bool = field(init=False, default=False)

    def reopen(self) -> None:
        """Give the pool back to training; the end comes again."""
        self.has_pool = self._is_last_begun = False

    def view(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands."""
        if eval_run_id in self.active:
            return self.active[eval_run_id].view()
        if eval_run_id in self._finished:
            return self._finished[eval_run_id]
        raise AstraflowError(Reason.EVAL_UNKNOWN, f"there is no evaluation '{eval_run_id}'")

    def note_version(self, policy_id: PolicyId, version: int, now: datetime) -> None:
        """Start what the recipe has due once this version exists."""
        if self.lifecycle.is_final:
            return
        for suite in self.settings.suites:
            policy_ids = suite.suite.policy_ids
            newest = newest_versions(self.policies, policy_ids)
            if newest is None or policy_id not in policy_ids:
                continue
            if suite.at_start and suite.suite.suite not in self._begun_suites:
                self._begun_suites.add(suite.suite.suite)
                self._start(suite, dict.fromkeys(policy_ids, 0), now)
            is_due = suite.every is not None and version > 0 and version % suite.every == 0
            if is_due and policy_id == policy_ids[0]:
                self._start(suite, newest, now)

    def note_end(self, now: datetime) -> None:
        """Start what is due when training is over; once, and not what was measured already."""
        if self._is_last_begun:
            return
        self._is_last_begun = True
        if self.lifecycle.stop is not None:
            return
        for suite in self.settings.suites:
            newest = newest_versions(self.policies, suite.suite.policy_ids)
            if suite.at_end and newest is not None and not self._was_measured(suite, newest):
                self._start(suite, newest, now)

    def request(self, event: EvalCreated, now: datetime) -> EvalRun:
        """Start an evaluation that somebody asked for, or return the one of this request."""
        if event.request_id in self._requests:
            known_id, known = self._requests[event.request_id]
            if known != event:
                raise AstraflowError(
                    Reason.REQUEST_CONFLICT,
                    f"request {event.request_id} asked for something else before",
                )
            return self.view(known_id)
        suites = {suite.suite.suite: suite for suite in self.settings.suites}
        if event.suite not in suites:
            names = ", ".join(suites) or "none"
            raise AstraflowError(
                Reason.EVAL_UNKNOWN, f"there is no suite '{event.suite}'; known: {names}"
            )
        suite, share = suites[event.suite], event.pool_share
        if not event.request_id or (share is not None and not 0 < share <= 1):
            raise AstraflowError(
                Reason.INVALID_FIELD, "an evaluation needs a request_id and a share of up to 1"
            )
        if self.lifecycle.is_ending:
            raise AstraflowError(Reason.RUN_ENDED, "the run is over; evaluate its checkpoints")
        pinned = self._pin(suite, event.versions)
        is_served = any(may_serve_pinned(member, pinned) for member in self.sessions.pool.values())
        if not is_served and not self._may_come(pinned):
            failure = not_served(pinned)
            raise AstraflowError(failure.reason, failure.message)
        work = self._start(suite, pinned, now, share=share)
        self._requests[event.request_id] = (work.eval_run_id, event)
        while len(self._requests) > _KEPT_COUNT:
            del self._requests[next(iter(self._requests))]
        return work.view()

    def _start(
        self,
        suite: SuiteSettings,
        versions: Mapping[PolicyId, int],
        now: datetime,
        *,
        share: float | None = None,
    ) -> EvalWork:
        work = EvalWork(
            eval_run_id=EvalRunId(self.ids.next("eval")),
            suite=suite,
            versions=versions,
            share=share or suite.pool_share,
            create_time=now,
        )
        self.active[work.eval_run_id] = work
        self.effects.do(EvalChanged(eval_run=work.view()))
        self._draw(work)
        return work

    def _pin(self, suite: SuiteSettings, versions: Mapping[PolicyId, int]) -> dict[PolicyId, int]:
        """Return one version for each policy of a suite; one that is left out: its newest."""
        policy_ids = suite.suite.policy_ids
        pinned: dict[PolicyId, int] = {}
        for policy_id in policy_ids:
            ledger = find_policy(self.policies, policy_id).versions
            pinned[policy_id] = versions.get(policy_id, max(0, ledger.shown_version))
            ledger.get(pinned[policy_id])
        foreign = set(versions) - set(policy_ids)
        if foreign:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"suite {suite.suite.suite} does not measure {', '.join(sorted(foreign))}",
            )
        return pinned

    def _may_come(self, versions: Mapping[PolicyId, int]) -> bool:
        """Whether a RaaS may still load these versions: they are the newest."""
        return newest_versions(self.policies, tuple(versions)) == dict(versions)

    def _draw(self, work: EvalWork) -> None:
        parts = work.suite.suite.data_sets
        data_sets = tuple(dict.fromkeys(part.data_set for part in parts))
        # Of a reading that did not come to its end.
        work.rows.clear()
        self.effects.do(DrawEvalPrompts(eval_run_id=work.eval_run_id, data_sets=data_sets))

    def draw_again(self) -> None:
        """Ask again for the rows that evaluations have yet to learn."""
        for work in self.active.values():
            if not work.is_offered:
                self._draw(work)

    def offer(self, event: EvalPromptsOffered) -> None:
        if event.eval_run_id in self.active:
            self.active[event.eval_run_id].offer(event.prompts, goes_on=event.goes_on)

    def accept(self, group: EvalGroup, index: int, rollout: Rollout) -> None:
        self._finish(group, index).score(group, rollout)

    def give_up(self, group: EvalGroup, index: int) -> None:
        """Count a sample that failed too often as missing."""
        self._finish(group, index).miss(group)

    def queue(self, group: EvalGroup) -> None:
        """Have what is unissued of a group issued again."""
        if group.enqueue():
            self.active[group.eval_run_id].again.append(group)

    def cancel(self, eval_run_id: EvalRunId, now: datetime) -> EvalRun:
        """Stop an evaluation; a final one stays as it is."""
        work = self.active.get(eval_run_id)
        if work is not None:
            self._withdraw(work)
            work.end(EvalState.CANCELLED, now)
            self._retire(work)
        return self.view(eval_run_id)

    def cancel_all(self, now: datetime) -> None:
        for eval_run_id in list(self.active):
            self.cancel(eval_run_id, now)

    def advance(self, now: datetime) -> None:
        """Issue what there is room for; end what is answered or cannot be."""
        for work in list(self.active.values()):
            before = work.state
            if not self.lifecycle.is_paused:
                self._issue(work, now)
            if work.is_answered:
                work.conclude(now)
                self._retire(work)
            elif self._is_stuck(work, now):
                self._withdraw(work)
                work.end(EvalState.FAILED, now, not_served(work.versions))
                self._retire(work)
            elif work.state is not before or work.is_worth_showing():
                self.effects.do(EvalChanged(eval_run=work.view()))

    @property
    def next_deadline(self) -> datetime | None:
        """When the first evaluation that nobody can serve is given up."""
        times = [work.stuck_time for work in self.active.values() if work.stuck_time is not None]
        return min(times) + self.settings.last_version_grace if times else None

    def _issue(self, work: EvalWork, now: datetime) -> None:
        while work.again:
            group = work.again[0]
            while group.unissued:
                place = self._find_capacity(work, len(group.unissued), now)
                if place is None:
                    return
                self._send(work, group, place, now)
            group.is_queued = False
            work.again.popleft()
        while work.next_size:
            place = self._find_capacity(work, work.next_size, now)
            if place is None:
                return
            group = work.begin_group(self.ids)
            self.tasks.open(group)
            self._send(work, group, place, now)
            if group.unissued:
                self.queue(group)
                return

    def _send(self, work: EvalWork, group: EvalGroup, place: MemberCapacity, now: datetime) -> None:
        place.member.pinned.update(work.versions.items())
        indexes = tuple(group.unissued[: place.free])
        pins = {p: VersionRange(min=version, max=version) for p, version in work.versions.items()}
        self.tasks.send(group, place.member, indexes=indexes, versions=pins, now=now)

    def _find_capacity(self, work: EvalWork, count: int, now: datetime) -> MemberCapacity | None:
        sessions = self.sessions
        share = 1.0 if self.has_pool else work.share

        def is_fit(member: LiveRaas) -> bool:
            return (
                not member.is_draining
                and not sessions.is_silent(member, now)
                and may_serve_pinned(member, work.versions)
            )

        view = PoolView(
            index=sessions.eval_capacity_index or sessions.capacity_index,
            pool=sessions.pool.values(),
            is_fit=is_fit,
            capacity_of=lambda member: eval_capacity(member, share),
        )
        return choose(view, PlacementRequest(count=count))

    def _is_stuck(self, work: EvalWork, now: datetime) -> bool:
        """Whether nobody has been able to serve the versions for too long."""
        if not (work.prompts or work.again):
            # It waits for answers alone.
            work.stuck_time = work.waits_for = None
            return False
        pool = [member for member in self.sessions.pool.values() if not member.is_draining]
        if any(may_serve_pinned(member, work.versions) for member in pool) or (
            not self.has_pool and self._may_come(work.versions)
        ):
            work.stuck_time = work.waits_for = None
            return False
        if self.has_pool and pool and not self._may_come(work.versions):
            # Training is over: nobody goes back to an older version, and nobody else will come.
            return True
        if work.stuck_time is None:
            work.stuck_time, work.waits_for = now, not_served(work.versions)
            self.effects.do(EvalChanged(eval_run=work.view()))
        return now - work.stuck_time >= self.settings.last_version_grace

    def _was_measured(self, suite: SuiteSettings, versions: Mapping[PolicyId, int]) -> bool:
        """Whether these versions were measured on a suite, or are just now."""
        runs = [*self._finished.values(), *(work.view() for work in self.active.values())]
        return any(
            run.suite == suite.suite.suite
            and run.versions == versions
            and run.state not in (EvalState.FAILED, EvalState.CANCELLED)
            for run in runs
        )

    def _withdraw(self, work: EvalWork) -> None:
        for group in tuple(work.open_groups.values()):
            self.tasks.withdraw_group(group, CancelReason.EVAL_CANCELLED)

    def _finish(self, group: EvalGroup, index: int) -> EvalWork:
        group.finish(index)
        if not group.open_count:
            self.tasks.close(group)
        return self.active[group.eval_run_id]

    def _retire(self, work: EvalWork) -> None:
        run = work.view()
        del self.active[work.eval_run_id]
        self._finished[work.eval_run_id] = run
        while len(self._finished) > _KEPT_COUNT:
            del self._finished[next(iter(self._finished))]
        for member in self.sessions.pool.values():
            member.pinned.difference_update(work.versions.items())
            # Who still has tasks of another one keeps its versions.
            groups = (assignment.group for assignment in member.assignments.values())
            held = {group.eval_run_id for group in groups if isinstance(group, EvalGroup)}
            for other in self.active.values():
                if other.eval_run_id in held:
                    member.pinned.update(other.versions.items())
        self.effects.do(EvalChanged(eval_run=run))
