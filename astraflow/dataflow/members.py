"""Members: what the hub knows of them beside the run, their history included.

The same events and effects leave the same directory, in a hub that returns or any other process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from math import isfinite
from typing import Any

from astraflow.core.batches import AckBatch
from astraflow.core.effects import CloseSession, Effect, RecordRollout, RecordVersion
from astraflow.core.errors import Reason
from astraflow.core.events import (
    Event,
    HubRestarted,
    MemberKeptAlive,
    RaasJoined,
    TokenRevoked,
    TrainerRegistered,
)
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.members import (
    JoinPool,
    MemberRole,
    MemberStatus,
    PoolMembership,
    RaasLoad,
    RegisterTrainer,
    TrainerLoad,
    TrainerRegistration,
)
from astraflow.core.versions import VersionReport, VersionState
from astraflow.rpc.access import SessionTokens

Load = RaasLoad | TrainerLoad


@dataclass(slots=True, kw_only=True)
class MemberRecord:
    """What is known of one member.

    Attributes:
        join_time: Of its first session.
        leave_time: Of the end of its last session; None: it is there.
        left_because: What ended that session.
        load: As last reported. `wait_fraction` is over the whole time: of a RaaS the mean of its
            reports, of a trainer by its acks.
        accepted_count: Rollouts taken from it.
        report_count: Reports of load.
        wait_s: Time that a trainer waited for batches, by its acks.
        train_s: Time that it trained.
        versions: Newest version that went live on it, by policy.
        failed_versions: Updates that failed, by reason.
    """

    name: str
    role: MemberRole
    region: str
    join_time: datetime
    leave_time: datetime | None = None
    left_because: str = ""
    load: Load | None = None
    accepted_count: int = 0
    report_count: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0
    versions: dict[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    failed_versions: dict[Reason, int] = field(default_factory=dict[Reason, int])


class MemberHistory:
    """Remembers members beyond their sessions."""

    def __init__(self) -> None:
        self._entries: dict[MemberId, MemberRecord] = {}

    def join(self, member_id: MemberId, request: JoinPool | RegisterTrainer, now: datetime) -> None:
        """Note a session that was opened, perhaps again."""
        role = MemberRole.RAAS if isinstance(request, JoinPool) else MemberRole.TRAINER
        entry = self._entries.get(member_id)
        if entry is None:
            entry = MemberRecord(name=request.name, role=role, region=request.region, join_time=now)
            self._entries[member_id] = entry
        entry.leave_time, entry.left_because = None, ""

    def leave(self, member_id: MemberId, message: str, now: datetime) -> None:
        if member_id in self._entries:
            self._entries[member_id].leave_time = now
            self._entries[member_id].left_because = message

    def report(self, member_id: MemberId, load: Load | None) -> None:
        entry = self._entries.get(member_id)
        if load is None or entry is None:
            return
        if isinstance(load, RaasLoad):
            mean = entry.load.wait_fraction if entry.load else 0.0
            # What is no number would stay in the mean for ever.
            waited = load.wait_fraction if isfinite(load.wait_fraction) else mean
            mean = (entry.report_count * mean + waited) / (entry.report_count + 1)
            load = replace(load, wait_fraction=mean)
        elif entry.wait_s + entry.train_s:
            load = replace(load, wait_fraction=_wait_fraction(entry))
        entry.report_count += 1
        entry.load = load

    def accept(self, member_id: MemberId) -> str:
        """Count a rollout; return where its member stands, as `region_of`."""
        entry = self._entries.get(member_id)
        if entry is None:
            return ""
        entry.accepted_count += 1
        return entry.region

    def train(self, ack: AckBatch) -> None:
        """Note how long a trainer waited for a batch and trained on it."""
        entry = self._entries.get(ack.member_id)
        if entry is None:
            return
        entry.wait_s += ack.wait_s
        entry.train_s += ack.train_s
        load = entry.load if isinstance(entry.load, TrainerLoad) else TrainerLoad()
        step = max(load.step, ack.step)
        entry.load = replace(load, step=step, wait_fraction=_wait_fraction(entry))

    def update(self, member_id: MemberId, report: VersionReport) -> None:
        """Note that a version went live, or failed to, on a member."""
        entry = self._entries.get(member_id)
        if entry is None:
            return
        if report.state is VersionState.LIVE:
            entry.versions[report.policy_id] = report.version
        elif report.failure is not None:
            reason = report.failure.reason
            entry.failed_versions[reason] = entry.failed_versions.get(reason, 0) + 1

    def region_of(self, member_id: MemberId) -> str:
        """Return where a member stands; empty: unknown."""
        entry = self._entries.get(member_id)
        return "" if entry is None else entry.region

    def rows(self, live: tuple[MemberStatus, ...]) -> list[dict[str, Any]]:
        """Return every member as JSON, in order of joining."""
        reissued: Mapping[MemberId, int] = {
            member.member_id: member.reissued_count for member in live
        }
        return [
            {"member_id": member_id, "reissued_count": reissued.get(member_id), **asdict(entry)}
            for member_id, entry in self._entries.items()
        ]


def _wait_fraction(entry: MemberRecord) -> float:
    """Return the share of a trainer's time without a batch, by its acks."""
    spent = entry.wait_s + entry.train_s
    return entry.wait_s / spent if spent else 0.0


class MemberDirectory:
    """Follows events and their effects; the same ones leave the same directory.

    Attributes:
        sessions: Who speaks with which token.
        roles: What each member does.
        policies: What each trainer trains.
        history: Every member that ever took part.
    """

    def __init__(self) -> None:
        self.sessions = SessionTokens()
        self.roles: dict[MemberId, MemberRole] = {}
        self.policies: dict[MemberId, PolicyId] = {}
        self.history = MemberHistory()

    def follow(
        self, event: Event, answer: object, effects: Sequence[Effect], now: datetime
    ) -> None:
        """Take note of an event and all that came of it."""
        for effect in effects:
            self.see(effect, now)
        self.note(event, answer, now)

    def see(self, effect: Effect, now: datetime) -> None:
        """Take note of what the run asks for."""
        match effect:
            case RecordRollout():
                self.history.accept(effect.member_id)
            case CloseSession():
                self._close(effect, now)
            case RecordVersion():
                self.history.update(effect.member_id, effect.report)
            case _:
                pass

    def note(self, event: Event, answer: object, now: datetime) -> None:
        """Take note of an event, after its effects."""
        match event, answer:
            case RaasJoined(), PoolMembership():
                self._admit(answer.session.member_id, event, now)
            case TrainerRegistered(), TrainerRegistration():
                self._admit(answer.session.member_id, event, now)
                self.policies[answer.session.member_id] = event.request.policy_id
            case MemberKeptAlive(), _:
                self.history.report(event.member_id, event.load)
            case AckBatch(), True:
                self.history.train(event)
            case TokenRevoked(), _:
                self.sessions.revoke(event.token_id)
            case HubRestarted(), _:
                self.expect_all()
            case _:
                pass

    def expect_all(self) -> None:
        """Have every RaaS resume its session: what was on its way to it is lost."""
        for member_id, role in self.roles.items():
            if role is MemberRole.RAAS:
                self.sessions.expect(member_id)

    def _admit(
        self, member_id: MemberId, event: RaasJoined | TrainerRegistered, now: datetime
    ) -> None:
        self.roles[member_id] = (
            MemberRole.RAAS if isinstance(event, RaasJoined) else MemberRole.TRAINER
        )
        secrets = event.secrets
        self.sessions.bind(
            secrets.token, member_id, token_id=secrets.token_id, is_relay=secrets.is_relay
        )
        self.history.join(member_id, event.request, now)

    def _close(self, effect: CloseSession, now: datetime) -> None:
        if effect.is_fenced:
            self.sessions.fence(effect.member_id)
        else:
            self.sessions.end(effect.member_id, effect.message)
            self.history.leave(effect.member_id, effect.message, now)
