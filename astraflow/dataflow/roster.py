"""The roster: every member that ever took part, for the account at the end."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from astraflow.core.errors import Reason
from astraflow.core.events import BatchAcked
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.members import (
    JoinPool,
    MemberStatus,
    RaasLoad,
    RegisterTrainer,
    Role,
    TrainerLoad,
)
from astraflow.core.versions import VersionReport, VersionState

Load = RaasLoad | TrainerLoad


@dataclass(slots=True, kw_only=True)
class Entry:
    """What is known of one member.

    Attributes:
        name: For people.
        role: What it does.
        region: Where it stands.
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
    role: Role
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


class Roster:
    """Remembers members beyond their sessions."""

    def __init__(self) -> None:
        self._entries: dict[MemberId, Entry] = {}

    def join(self, member_id: MemberId, request: JoinPool | RegisterTrainer, now: datetime) -> None:
        """Note a session that was opened, perhaps again."""
        role = Role.RAAS if isinstance(request, JoinPool) else Role.TRAINER
        entry = self._entries.get(member_id)
        if entry is None:
            entry = Entry(name=request.name, role=role, region=request.region, join_time=now)
            self._entries[member_id] = entry
        entry.leave_time, entry.left_because = None, ""

    def leave(self, member_id: MemberId, message: str, now: datetime) -> None:
        """Note the end of a session."""
        if member_id in self._entries:
            self._entries[member_id].leave_time = now
            self._entries[member_id].left_because = message

    def report(self, member_id: MemberId, load: Load | None) -> None:
        """Note a report of load."""
        entry = self._entries.get(member_id)
        if load is None or entry is None:
            return
        if isinstance(load, RaasLoad):
            waited = entry.report_count * (entry.load.wait_fraction if entry.load else 0.0)
            mean = (waited + load.wait_fraction) / (entry.report_count + 1)
            load = replace(load, wait_fraction=mean)
        elif entry.wait_s + entry.train_s:
            load = replace(load, wait_fraction=_wait_fraction(entry))
        entry.report_count += 1
        entry.load = load

    def accept(self, member_id: MemberId) -> None:
        """Count a rollout taken from a member."""
        if member_id in self._entries:
            self._entries[member_id].accepted_count += 1

    def train(self, ack: BatchAcked) -> None:
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
        """Return every member as JSON, in order of joining.

        Args:
            live: What the run says of those that are there.
        """
        reissued: Mapping[MemberId, int] = {
            member.member_id: member.reissued_count for member in live
        }
        return [
            {"member_id": member_id, "reissued_count": reissued.get(member_id), **asdict(entry)}
            for member_id, entry in self._entries.items()
        ]


def _wait_fraction(entry: Entry) -> float:
    """Return the share of a trainer's time without a batch, by its acks."""
    spent = entry.wait_s + entry.train_s
    return entry.wait_s / spent if spent else 0.0
