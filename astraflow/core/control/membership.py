"""Membership: sessions are renewed and end; what a member held goes on without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from astraflow.core.effects import (
    CloseSession,
    Effects,
    RecordVersion,
    Renewal,
    SendDirective,
    SendScrubOrder,
)
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import Event, MemberKeptAlive
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.members import Directive, DirectiveKind, RaasLoad, TrainerLoad
from astraflow.core.policy.state import PolicyState, find_policy
from astraflow.core.pool.live_members import LiveMember, LiveRaas, LiveTrainer
from astraflow.core.pool.sessions import Sessions
from astraflow.core.tasks import TaskCredit
from astraflow.core.versions import VersionReport, VersionState
from astraflow.core.work.batching import Batching
from astraflow.core.work.intake import Intake

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
        return Renewal(
            ttl=self.sessions.ttl,
            directive=self._directive(member, now),
            server_time=now,
        )

    def is_plain_renewal(self, event: Event, now: datetime) -> bool:
        """Whether an event only says that a member is there which nobody took for silent."""
        if not isinstance(event, MemberKeptAlive):
            return False
        member = self.sessions.find(event.member_id)
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
        member = self.sessions.find(member_id)
        if member is not None:
            self.close(member, now, is_lost=False, message=message)

    def drain(self, member_id: MemberId, grace: timedelta | None, now: datetime) -> None:
        """Let a member finish and leave."""
        member = self.sessions.find(member_id)
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

    def renew_all(self, now: datetime) -> None:
        """Give every session its whole time again: nobody could say anything meanwhile."""
        for member in self.sessions:
            member.keep_alive(now)

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
        trainer = self.sessions.trainer_of(report.policy_id)
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
            for assignment in list(member.assignments.values()):
                self.intake.lose(member, assignment, now, is_lost=is_lost)
            return
        policy = self.policies[member.policy_id]
        policy.departure_time = member.keep_alive_time if is_lost else now
        self.batching.return_all(policy)
        policy.lease_table.close()
