"""The roster: every member that ever took part, for the account at the end."""

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from astraflow.core.ids import MemberId
from astraflow.core.members import (
    JoinPool,
    MemberStatus,
    RaasLoad,
    RegisterTrainer,
    Role,
    TrainerLoad,
)

Load = RaasLoad | TrainerLoad


@dataclass(slots=True, kw_only=True)
class Entry:
    """What is known of one member.

    Attributes:
        name: For people.
        role: What it does.
        join_time: Of its first session.
        leave_time: Of the end of its last session; None: it is there.
        left_because: What ended that session.
        load: As last reported, with the mean share of time it waited over all reports.
        accepted_count: Rollouts taken from it.
        report_count: Reports of load.
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
        if load is not None and member_id in self._entries:
            entry = self._entries[member_id]
            waited = entry.report_count * entry.load.wait_fraction if entry.load else 0.0
            entry.report_count += 1
            wait_fraction = (waited + load.wait_fraction) / entry.report_count
            entry.load = replace(load, wait_fraction=wait_fraction)

    def accept(self, member_id: MemberId) -> None:
        """Count a rollout taken from a member."""
        if member_id in self._entries:
            self._entries[member_id].accepted_count += 1

    def rows(self, live: tuple[MemberStatus, ...]) -> list[dict[str, Any]]:
        """Return every member as JSON, in order of joining.

        Args:
            live: What the run says of those that are there.
        """
        versions = {member.member_id: dict(member.versions) for member in live}
        reissued = {member.member_id: member.reissued_count for member in live}
        rows: list[dict[str, Any]] = []
        for member_id, entry in self._entries.items():
            row = asdict(entry)
            row["versions"] = versions.get(member_id, {})
            row["reissued_count"] = reissued.get(member_id)
            rows.append({"member_id": member_id} | row)
        return rows
