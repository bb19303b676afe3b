"""Sessions: who takes part, and until when."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import heappop, heappush, heapreplace

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.members import (
    MemberRole,
    MemberState,
    MemberStatus,
)
from astraflow.core.pool.live_members import (
    CapacityIndex,
    LiveMember,
    LiveRaas,
    LiveTrainer,
    VersionIndex,
)
from astraflow.core.versions import SourceRecord

# A member that missed two of its three KeepAlives per ttl gets nothing new.
_SUSPECT_SHARE = 2 / 3

# Ended sessions that can still be resumed under their member id.
_DEPARTED_COUNT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """What is remembered of an ended session, so that it can be resumed."""

    role: MemberRole
    incarnation: int


class Sessions:
    """All live sessions, in the order in which they were opened.

    Attributes:
        ttl: A session that says nothing for so long ends.
        source_record: What receivers said of sources of weights.
        pool: The RaaS, in the order in which they joined.
        trainers: The trainer of each policy that has one.
        members: All of them, in the order in which they joined.
        departed: Ended sessions that can be resumed.
        capacity_index: The pool by free credit for training.
        eval_capacity_index: The same for evaluations; None: there are none.
        version_index: The pool by what is live there.
    """

    eval_capacity_index: CapacityIndex | None = None

    def __init__(self, *, ttl: timedelta, unit: int = 1, has_evals: bool = False) -> None:
        self.ttl = ttl
        self.source_record = SourceRecord()
        self.capacity_index = CapacityIndex(unit=unit)
        self.eval_capacity_index = CapacityIndex(unit=1, is_eval=True) if has_evals else None
        self.version_index = VersionIndex()
        self.members: dict[MemberId, LiveRaas | LiveTrainer] = {}
        self.pool: dict[MemberId, LiveRaas] = {}
        self.trainers: dict[PolicyId, LiveTrainer] = {}
        self._number = 0
        # When to look at which session for its end, never later than that is; the number tells
        # entries of one time and member apart.
        self._ends: list[tuple[datetime, MemberId, int, LiveRaas | LiveTrainer]] = []
        self._entry_count = 0
        self.departed: dict[MemberId, Departed] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[LiveRaas | LiveTrainer]:
        return iter(self.members.values())

    def get(self, member_id: MemberId) -> LiveRaas | LiveTrainer:
        """Return a live session.

        Raises:
            AstraflowError: SESSION_ENDED.
        """
        member = self.members.get(member_id)
        if member is None:
            raise AstraflowError(
                Reason.SESSION_ENDED, f"the session of {member_id} has ended; resume it"
            )
        return member

    def raas(self, member_id: MemberId) -> LiveRaas:
        """Return a live RaaS.

        Raises:
            AstraflowError: SESSION_ENDED, ROLE_NOT_ALLOWED.
        """
        member = self.members.get(member_id)
        if isinstance(member, LiveRaas):
            return member
        self.get(member_id)
        raise AstraflowError(Reason.ROLE_NOT_ALLOWED, f"{member_id} is a trainer, not a RaaS")

    def trainer(self, member_id: MemberId) -> LiveTrainer:
        """Return a live trainer.

        Raises:
            AstraflowError: SESSION_ENDED, ROLE_NOT_ALLOWED.
        """
        member = self.members.get(member_id)
        if isinstance(member, LiveTrainer):
            return member
        self.get(member_id)
        raise AstraflowError(Reason.ROLE_NOT_ALLOWED, f"{member_id} is a RaaS, not a trainer")

    def open(self, member: LiveRaas | LiveTrainer) -> None:
        self.members[member.member_id] = member
        self.departed.pop(member.member_id, None)
        if isinstance(member, LiveTrainer):
            self.trainers[member.policy_id] = member
        else:
            self._number += 1
            member.number = self._number
            member.capacity_index, member.eval_capacity_index = (
                self.capacity_index,
                self.eval_capacity_index,
            )
            member.version_index = self.version_index
            self.version_index.enter(member)
            self.pool[member.member_id] = member
        self._enter_end(member)

    def close(self, member_id: MemberId) -> None:
        member = self.members.pop(member_id)
        if isinstance(member, LiveTrainer):
            self.trainers.pop(member.policy_id, None)
        else:
            del self.pool[member_id]
            member.leave_indexes()
        self.departed[member_id] = Departed(role=member.role, incarnation=member.incarnation)
        while len(self.departed) > _DEPARTED_COUNT:
            del self.departed[next(iter(self.departed))]

    def drain(self, member: LiveRaas | LiveTrainer, until: datetime | None) -> None:
        """Give a member nothing new; its session ends at a time, None: when it leaves."""
        member.is_draining, member.drain_time = True, until
        self._enter_end(member)

    def end_of(self, member: LiveMember) -> datetime:
        """Return when a session ends unless its member says something."""
        expiry = member.keep_alive_time + self.ttl
        return min(expiry, member.drain_time) if member.drain_time else expiry

    def is_silent(self, member: LiveMember, now: datetime) -> bool:
        """Whether it should have said something by now."""
        return now - member.keep_alive_time > self.ttl * _SUSPECT_SHARE

    @property
    def next_end(self) -> datetime | None:
        """When the first session ends unless its member says something."""
        while self._ends:
            time, member_id, number, member = self._ends[0]
            if self.members.get(member_id) is not member:
                heappop(self._ends)
                continue
            end = member.keep_alive_time + self.ttl
            if member.drain_time and member.drain_time < end:
                end = member.drain_time
            if end <= time:
                return time
            heapreplace(self._ends, (end, member_id, number, member))
        return None

    def ended(self, now: datetime) -> LiveRaas | LiveTrainer | None:
        """Return a member whose session is over, the first one to end; None: nobody's is."""
        end = self.next_end
        return None if end is None or end > now else self._ends[0][3]

    def status(self, member: LiveRaas | LiveTrainer, now: datetime) -> MemberStatus:
        raas, state = member if isinstance(member, LiveRaas) else None, MemberState.LIVE
        if member.is_draining:
            state = MemberState.DRAINING
        elif self.is_silent(member, now):
            state = MemberState.SUSPECT
        elif raas is not None and not raas.live:
            state = MemberState.JOINING
        return MemberStatus(
            member_id=member.member_id,
            name=member.name,
            role=member.role,
            state=state,
            region=member.region,
            versions=dict(raas.live) if raas else {},
            resources=member.resources,
            load=member.load,
            accepted_count=member.accepted_count,
            reissued_count=member.reissued_count,
            outstanding_count=raas.outstanding if raas else 0,
            max_outstanding=raas.max_outstanding if raas else 0,
            join_time=member.join_time,
            keep_alive_time=member.keep_alive_time,
        )

    def _enter_end(self, member: LiveRaas | LiveTrainer) -> None:
        self._entry_count += 1
        entry = self.end_of(member), member.member_id, self._entry_count, member
        heappush(self._ends, entry)
