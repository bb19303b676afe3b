"""Membership: who may be a member, as what, how sessions are renewed, and how they end.

What of an earlier session can go on does; what a member held goes on without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from astraflow.core.effects import (
    AnnounceVersion,
    ClearOutbox,
    CloseSession,
    Effects,
    RecordVersion,
    Renewal,
    SendCancellation,
    SendDirective,
    SendScrubOrder,
    SendTask,
)
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import (
    RaasJoined,
    SessionSecrets,
    TrainerRegistered,
)
from astraflow.core.ids import BatchId, IdGenerator, MemberId, PolicyId, TaskId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.members import (
    CONTRACT_VERSION,
    Capability,
    Contract,
    Directive,
    DirectiveKind,
    JoinPool,
    MemberRole,
    ModelIdentity,
    PoolMembership,
    RaasLoad,
    RegisterTrainer,
    Session,
    SessionResume,
    TrainerLoad,
    TrainerRegistration,
)
from astraflow.core.policy.state import PolicyState, find_policy
from astraflow.core.pool.live_members import LiveMember, LiveRaas, LiveTrainer
from astraflow.core.pool.sessions import Departed, Sessions
from astraflow.core.pool.sources import version_with_sources
from astraflow.core.samples import RolloutRecords
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import CancelReason, RegisteredCode, TaskCredit, WorkflowSpec
from astraflow.core.versions import VersionReport, VersionState
from astraflow.core.work.batching import Batching
from astraflow.core.work.intake import Intake
from astraflow.core.work.prompt_queue import PromptQueue
from astraflow.core.work.training import Training

CONTINUE = Directive(kind=DirectiveKind.CONTINUE)


@dataclass(slots=True, kw_only=True, eq=False)
class Membership:
    """Opens, renews and ends sessions."""

    sessions: Sessions
    policies: Mapping[PolicyId, PolicyState]
    intake: Intake
    batching: Batching
    lifecycle: RunLifecycle
    effects: Effects

    def keep_alive(
        self, member_id: MemberId, load: RaasLoad | TrainerLoad | None, now: datetime
    ) -> Renewal:
        """Renew a session."""
        member = self.sessions.get(member_id)
        member.keep_alive(now, load)
        directive = self._directive(member, now)
        return Renewal(ttl=self.sessions.ttl, directive=directive, server_time=now)

    def is_there(self, member_id: MemberId, now: datetime) -> bool:
        """Whether a member has a session and nobody takes it for silent."""
        member = self.sessions.members.get(member_id)
        return member is not None and not self.sessions.is_silent(member, now)

    def give_credit(self, member: LiveRaas, event: TaskCredit) -> None:
        """Bound the work of a RaaS from now on.

        Raises:
            AstraflowError: INVALID_FIELD for a negative credit.
        """
        bounds = event.max_outstanding, event.max_eval_outstanding or 0, event.max_eval_extra
        if min(bounds) < 0:
            raise AstraflowError(Reason.INVALID_FIELD, "credit is at least 0")
        member.give_credit(
            event.max_outstanding, event.max_eval_outstanding, extra=event.max_eval_extra
        )

    def leave(self, member_id: MemberId, message: str, now: datetime) -> None:
        """End a session in good order; an ended one stays so."""
        member = self.sessions.members.get(member_id)
        if member is not None:
            self.close(member, now, is_lost=False, message=message)

    def drain(self, member_id: MemberId, grace: timedelta | None, now: datetime) -> None:
        """Let a member finish and leave."""
        member = self.sessions.members.get(member_id)
        if member is None:
            raise AstraflowError(Reason.MEMBER_UNKNOWN, f"there is no member '{member_id}'")
        self.sessions.drain(member, None if grace is None else now + grace)
        directive = Directive(kind=DirectiveKind.DRAIN, grace=grace, message="asked by an operator")
        self.effects.do(SendDirective(member_id=member_id, directive=directive))

    def remind(self, member: LiveMember, now: datetime) -> None:
        """Tell a member again that it is to leave: what told it went with its last stream."""
        if member.is_draining:
            directive = self._directive(member, now)
            self.effects.do(SendDirective(member_id=member.member_id, directive=directive))

    def expire(self, now: datetime) -> None:
        """End the sessions of those who went silent or overstayed."""
        while (member := self.sessions.ended(now)) is not None:
            overstayed = member.drain_time is not None and member.drain_time <= now
            message = "its grace to drain is over" if overstayed else "it went silent"
            self.close(member, now, is_lost=not overstayed, message=message)

    def report(self, member: LiveRaas, report: VersionReport) -> None:
        """Note where a version stands on a RaaS."""
        policy = find_policy(self.policies, report.policy_id)
        if not 0 <= report.version <= policy.versions.newest_version:
            policy.versions.get(report.version)
        record = self.sessions.source_record
        record.note(member.member_id, member.region, report.reports)
        record.note_alive(member.relay_endpoint)
        member.note_version(report)
        policy.load_failure = report.failure or policy.load_failure
        if report.state in (VersionState.LIVE, VersionState.FAILED):
            self.effects.do(RecordVersion(member_id=member.member_id, report=report))
        trainer = self.sessions.trainers.get(report.policy_id)
        if report.is_unsound and trainer is not None:
            # What the trainer published may be damaged there: it is to look at its copy.
            self.effects.do(SendScrubOrder(member_id=trainer.member_id, version=report.version))

    def _directive(self, member: LiveMember, now: datetime) -> Directive:
        if self.lifecycle.is_final:
            return Directive(kind=DirectiveKind.STOP, message="the run is over")
        if member.is_draining:
            left = None if member.drain_time is None else max(timedelta(), member.drain_time - now)
            return Directive(kind=DirectiveKind.DRAIN, grace=left)
        return CONTINUE

    def close(
        self,
        member: LiveRaas | LiveTrainer,
        now: datetime,
        *,
        is_lost: bool,
        message: str,
        is_fenced: bool = False,
    ) -> None:
        """End a session: what the member held is issued again, or goes back to the buffer."""
        self.sessions.close(member.member_id)
        self.effects.do(
            CloseSession(
                member_id=member.member_id, is_lost=is_lost, is_fenced=is_fenced, message=message
            )
        )
        if isinstance(member, LiveRaas):
            self.intake.lose_all(member, now, is_lost=is_lost)
            return
        policy = self.policies[member.policy_id]
        policy.departure_time = member.keep_alive_time if is_lost else now
        self.batching.return_all(policy)
        policy.lease_table.close()


M = TypeVar("M", LiveRaas, LiveTrainer)


def check_contract(contract: Contract) -> None:
    """Refuse a peer that speaks another contract."""
    if contract.contract_version < 1:
        raise AstraflowError(
            Reason.CONTRACT_UNSUPPORTED,
            f"contract {contract.contract_version} is not spoken here, only 1 to "
            f"{CONTRACT_VERSION}; update {contract.software or 'the member'}",
        )


def check_routes(contract: Contract, policy_id: PolicyId) -> None:
    """Refuse a peer that neither tells nor replays the experts of a policy that needs it."""
    if Capability.ROUTED_EXPERTS not in contract.capabilities:
        raise AstraflowError(
            Reason.CONTRACT_UNSUPPORTED,
            f"{policy_id} is trained with router_replay: required, and this member has no "
            "capability routed_experts; take an engine that tells, and a model with routers, or "
            "set router_replay: told",
        )


def check_codes(workflow: WorkflowSpec, codes: Sequence[RegisteredCode]) -> None:
    """Refuse a RaaS that lacks the code of a workflow, or has another release of it."""
    digests = {code.name: code.code_digest for code in codes}
    for wanted in (workflow.code, workflow.scorer):
        if wanted is None:
            continue
        if wanted.name not in digests:
            raise AstraflowError(
                Reason.CODE_UNKNOWN,
                f"workflow {workflow.workflow_id} needs '{wanted.name}', which the RaaS has not; "
                "install or register it there",
            )
        digest = digests[wanted.name]
        if digest and wanted.code_digest and digest != wanted.code_digest:
            raise AstraflowError(
                Reason.CODE_MISMATCH,
                f"the RaaS has another release of '{wanted.name}' than the hub; "
                "install the same one",
            )


@dataclass(slots=True, kw_only=True, eq=False)
class Joining:
    """Opens sessions."""

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    records: RolloutRecords
    prompts: PromptQueue
    training: Training
    batching: Batching
    membership: Membership
    ids: IdGenerator
    lifecycle: RunLifecycle
    effects: Effects

    def join_pool(self, event: RaasJoined, now: datetime) -> PoolMembership:
        request = event.request
        known = self._known(event.resumes, request.resume, MemberRole.RAAS)
        identities = self._must_be_admissible(request, known)
        member = self._take_over(known, request.resume, now)
        if not isinstance(member, LiveRaas):
            member = self._opened(event, now, LiveRaas, policies={})
        member.keep_alive(now)
        member.describe(request)
        for served in request.policies:
            policy, version = self.policies[served.policy_id], served.version
            policy.identity = identities[served.policy_id]
            if version is not None and 0 <= version <= policy.versions.newest_version:
                member.go_live(served.policy_id, version)
        held = self._resend(member, request.resume)
        workflows = tuple(w for w in self.settings.workflows if member.serves(w.policy_ids))
        return PoolMembership(
            session=self._session(member, event.secrets, task_ids=held),
            run_id=self.settings.run_id,
            workflows=workflows,
        )

    def register(self, event: TrainerRegistered, now: datetime) -> TrainerRegistration:
        request = event.request
        policy = find_policy(self.policies, request.policy_id)
        known = self._known(event.resumes, request.resume, MemberRole.TRAINER)
        self._must_train(policy, request, known)
        goes_on = self._goes_on(known, request.resume)
        undone = 0
        if not goes_on:
            undone = policy.lineage.undone_count(request.checkpoint_id, request.last_step)
        member = self._take_over(known, request.resume, now)
        held = frozenset(request.resume.held_batch_ids if request.resume else ())
        if isinstance(member, LiveTrainer):
            self.batching.return_all(policy, but=held)
            policy.lease_table.close()
        else:
            member = self._opened(event, now, LiveTrainer, policy_id=request.policy_id)
            self.batching.regain(policy, held)
        rolled_back = self._roll_back(policy, undone, request.last_step) if not goes_on else 0
        policy.departure_time = None
        member.weight_endpoints = request.weight_endpoints
        member.keep_alive(now)
        policy.identity = policy.identity.merged(request.identity)
        self.effects.do(ClearOutbox(member_id=member.member_id))
        listed = policy.versions.listed
        if listed and member.weight_endpoints:
            # Who pulls is told that the newest version has another source.
            info = version_with_sources(self.sessions, listed[-1])
            self.effects.do(AnnounceVersion(info=info))
        return TrainerRegistration(
            session=self._session(
                member, event.secrets, batch_ids=tuple(policy.lease_table.leases)
            ),
            run_id=self.settings.run_id,
            max_staleness=policy.settings.max_staleness,
            next_version=policy.versions.next_version,
            rolled_back_batch_count=rolled_back,
        )

    def _roll_back(self, policy: PolicyState, count: int, step: int) -> int:
        """Take the books of a policy back; return how many batches count as not trained now."""
        if count and not policy.settings.max_staleness:
            self.training.take_back(policy)
        undone = policy.roll_back(count, step)
        self.records.undo(policy.policy_id, {batch.batch_id for batch in undone})
        self.prompts.lose(policy.samples.take_lost())
        return len(undone)

    def _must_be_admissible(
        self, request: JoinPool, known: MemberId | None
    ) -> Mapping[PolicyId, ModelIdentity]:
        """Refuse a RaaS that does not fit; return what is known of its models with it."""
        check_contract(request.contract)
        identities: dict[PolicyId, ModelIdentity] = {}
        for served in request.policies:
            policy = find_policy(self.policies, served.policy_id)
            # It may name a policy twice.
            before = identities.get(served.policy_id, policy.identity)
            identities[served.policy_id] = before.merged(served.identity)
            if policy.settings.needs_routes:
                check_routes(request.contract, served.policy_id)
        for workflow in self.settings.workflows:
            if identities.keys() >= set(workflow.policy_ids):
                check_codes(workflow, request.codes)
        for member in self.sessions:
            if member.name == request.name and member.member_id != known:
                raise AstraflowError(
                    Reason.NAME_TAKEN,
                    f"a member named '{request.name}' is here already; choose another name",
                )
        self._must_go_on()
        return identities

    def _must_train(
        self, policy: PolicyState, request: RegisterTrainer, known: MemberId | None
    ) -> None:
        check_contract(request.contract)
        policy.identity.merged(request.identity)
        if policy.settings.needs_routes:
            check_routes(request.contract, request.policy_id)
        if request.groups_per_batch != policy.settings.groups_per_batch:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the run makes batches of {policy.settings.groups_per_batch} groups for "
                f"{request.policy_id}, the trainer wants {request.groups_per_batch}",
                metadata={"field": "groups_per_batch"},
            )
        other = self.sessions.trainers.get(request.policy_id)
        if other is not None and other.member_id != known:
            raise AstraflowError(
                Reason.POLICY_TAKEN,
                f"{request.policy_id} is trained by {other.member_id} ({other.name}); "
                f"a silent trainer's session ends after {self.sessions.ttl}",
                retryable=True,
            )
        self._must_go_on()

    def _must_go_on(self) -> None:
        if self.lifecycle.is_final:
            raise AstraflowError(Reason.RUN_ENDED, "the run is over; start a new one")

    def _known(
        self, member_id: MemberId | None, resume: SessionResume | None, role: MemberRole
    ) -> MemberId | None:
        """Return whose session is continued."""
        if member_id is None or resume is None:
            return None
        known = self._remembered(member_id)
        if known is None:
            return member_id
        if known.role is not role:
            raise AstraflowError(Reason.ROLE_NOT_ALLOWED, f"{member_id} is a {known.role}")
        if resume.incarnation < known.incarnation:
            raise AstraflowError(
                Reason.SESSION_FENCED,
                f"incarnation {known.incarnation} of {member_id} took over from "
                f"{resume.incarnation}; stop this process",
            )
        return member_id

    def _goes_on(self, known: MemberId | None, resume: SessionResume | None) -> bool:
        """Whether it is the same process as before, with the state that it had."""
        before = None if known is None else self._remembered(known)
        return bool(before and resume and before.incarnation == resume.incarnation)

    def _remembered(self, member_id: MemberId) -> LiveMember | Departed | None:
        return self.sessions.members.get(member_id) or self.sessions.departed.get(member_id)

    def _take_over(
        self, known: MemberId | None, resume: SessionResume | None, now: datetime
    ) -> LiveRaas | LiveTrainer | None:
        """Return the live session to go on with; one of an older incarnation is ended for good."""
        live = None if known is None else self.sessions.members.get(known)
        if known is None or self._goes_on(known, resume):
            return live
        message = "a newer process took over"
        if live is not None:
            self.membership.close(live, now, is_lost=False, is_fenced=True, message=message)
        elif known in self.sessions.departed:
            # Its process may only have been silent: it does not speak for the newer one.
            self.effects.do(
                CloseSession(member_id=known, is_lost=False, is_fenced=True, message=message)
            )
        return None

    def _opened(
        self, event: RaasJoined | TrainerRegistered, now: datetime, kind: type[M], **own: Any
    ) -> M:
        """Open a session, be it under the name of one that has ended."""
        request = event.request
        role = MemberRole.RAAS if kind is LiveRaas else MemberRole.TRAINER
        member = kind(
            member_id=event.resumes or MemberId(self.ids.next(role)),
            name=request.name,
            role=role,
            incarnation=request.resume.incarnation if request.resume else 1,
            region=request.region,
            resources=request.resources,
            join_time=now,
            keep_alive_time=now,
            **own,
        )
        self.sessions.open(member)
        return member

    def _resend(self, member: LiveRaas, resume: SessionResume | None) -> tuple[TaskId, ...]:
        """Send again what the RaaS holds by the books and does not know of."""
        self.effects.do(ClearOutbox(member_id=member.member_id))
        named = frozenset(resume.held_task_ids) if resume else frozenset[TaskId]()
        for task_id, assignment in tuple(member.assignments.items()):
            if task_id not in named and assignment.is_withdrawn:
                # Nobody has it, so no result is due.
                self.membership.intake.tasks.end(member, assignment)
            elif task_id not in named:
                self.effects.do(SendTask(member_id=member.member_id, task=assignment.task))
            elif assignment.is_withdrawn:
                self.effects.do(
                    SendCancellation(
                        member_id=member.member_id, task_id=task_id, reason=CancelReason.STALE
                    )
                )
        return tuple(task_id for task_id in member.assignments if task_id in named)

    def _session(
        self,
        member: LiveMember,
        secrets: SessionSecrets,
        *,
        task_ids: tuple[TaskId, ...] = (),
        batch_ids: tuple[BatchId, ...] = (),
    ) -> Session:
        ttl = self.sessions.ttl
        return Session(
            member_id=member.member_id,
            token=secrets.token,
            ttl=ttl,
            keep_alive_interval=ttl / 3,
            transfer_token=secrets.transfer_token,
            max_message_nbytes=self.settings.max_message_nbytes,
            held_task_ids=task_ids,
            held_batch_ids=batch_ids,
        )
