"""The memory of the hub: what it knows of members beside the run, and must know again later."""

from datetime import datetime

from astraflow.core.effects import CloseSession, Effect, RecordRollout, RecordVersion, SendTask
from astraflow.core.events import (
    BatchAcked,
    Event,
    HubRestarted,
    MemberKeptAlive,
    RaasJoined,
    TrainerRegistered,
    VersionPublished,
)
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.members import PoolMembership, Role, TrainerRegistration
from astraflow.core.tasks import TaskPurpose
from astraflow.dataflow.roster import Roster
from astraflow.rpc.tokens import SessionTokens


class Memory:
    """Follows events and their effects; the same ones leave the same memory.

    Attributes:
        sessions: Who speaks with which token.
        roles: What each member does.
        policies: What each trainer trains.
        roster: Every member that ever took part.
        first_task_time: Of the first task for training.
        last_version_time: Of the newest version.
    """

    def __init__(self) -> None:
        self.sessions = SessionTokens()
        self.roles: dict[MemberId, Role] = {}
        self.policies: dict[MemberId, PolicyId] = {}
        self.roster = Roster()
        self.first_task_time: datetime | None = None
        self.last_version_time: datetime | None = None

    def see(self, effect: Effect, now: datetime) -> None:
        """Take note of what the run asks for."""
        match effect:
            case SendTask():
                if self.first_task_time is None and effect.task.purpose is TaskPurpose.TRAIN:
                    self.first_task_time = now
            case CloseSession():
                self._close(effect, now)
            case RecordRollout():
                self.roster.accept(effect.member_id)
            case RecordVersion():
                self.roster.update(effect.member_id, effect.report)
            case _:
                pass

    def note(self, event: Event, answer: object, now: datetime) -> None:
        """Take note of an event, after its effects.

        Args:
            event: A joining one carries the digest of its token.
            answer: What the run said.
            now: When it said so.
        """
        match event, answer:
            case RaasJoined(), PoolMembership():
                self._admit(answer.session.member_id, event, now)
            case TrainerRegistered(), TrainerRegistration():
                self._admit(answer.session.member_id, event, now)
                self.policies[answer.session.member_id] = event.request.policy_id
            case MemberKeptAlive(), _:
                self.roster.report(event.member_id, event.load)
            case BatchAcked(), True:
                self.roster.train(event)
            case HubRestarted(), _:
                self.expect_all()
            case VersionPublished(), _:
                self.last_version_time = now
            case _:
                pass

    def expect_all(self) -> None:
        """Have every RaaS resume its session: what was on its way to it is lost."""
        for member_id, role in self.roles.items():
            if role is Role.RAAS:
                self.sessions.expect(member_id)

    def _admit(
        self, member_id: MemberId, event: RaasJoined | TrainerRegistered, now: datetime
    ) -> None:
        self.roles[member_id] = Role.RAAS if isinstance(event, RaasJoined) else Role.TRAINER
        self.sessions.bind(event.secrets.token, member_id)
        self.roster.join(member_id, event.request, now)

    def _close(self, effect: CloseSession, now: datetime) -> None:
        if effect.is_fenced:
            self.sessions.fence(effect.member_id)
        else:
            self.sessions.end(effect.member_id, effect.message)
            self.roster.leave(effect.member_id, effect.message, now)
