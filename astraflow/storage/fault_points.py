"""Fault points: named places where a process can be told to die, for crash tests.

`ASTRAFLOW_FAULT=journal_committed:3` lets a hub kill itself with SIGKILL when it reaches that place
for the third time. Unset, a place costs one look at an empty dictionary.
"""

import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from astraflow.core.errors import AstraflowError, Reason

VARIABLE: Final = "ASTRAFLOW_FAULT"


class FaultPoint(StrEnum):
    """Where a process can die, in the order in which a hub comes to them."""

    RECOVERY_OPENED = "recovery_opened"
    """The journal is open, nothing is replayed."""
    RECOVERY_REPLAYED = "recovery_replayed"
    """The state is back; that the hub restarted is not recorded."""
    RECOVERY_SERVING = "recovery_serving"
    """Calls are answered; nothing was committed since the start."""
    JOURNAL_WAITING = "journal_waiting"
    """A group of records is decided and not written."""
    JOURNAL_WRITTEN = "journal_written"
    """Its records are written and not committed."""
    JOURNAL_COMMITTED = "journal_committed"
    """They are committed; nothing has come of them, and no ack has left."""
    CARRIED_OUT_HALF = "carried_out_half"
    """A part of what comes of a group was carried out."""
    MEMBER_SAFE = "member_safe"
    """A member has joined and does not know."""
    ROLLOUTS_SAFE = "rollouts_safe"
    """Rollouts are safe; their acks were not sent."""
    BATCH_HEADER_SENT = "batch_header_sent"
    """A trainer has the header of a batch and none of its parts."""
    BATCH_SETTLED = "batch_settled"
    """The ack of a batch is safe; its trainer does not know."""
    VERSION_SAFE = "version_safe"
    """A version is announced; its trainer does not know."""
    SNAPSHOT_DUMPED = "snapshot_dumped"
    """In the fork that makes a snapshot: its bytes are there, nothing is written."""
    SNAPSHOT_DRAFTED = "snapshot_drafted"
    """There, too: the new snapshot is whole and not in its place."""
    SNAPSHOT_PLACED = "snapshot_placed"
    """There, too: it is in its place, and its records are still in the journal."""
    TRIM_STARTED = "trim_started"
    """The hub knows of the snapshot; no record is let go."""
    TRIMMED_SOME = "trimmed_some"
    """Some of the records are let go."""


armed: Final[dict[FaultPoint, int]] = {}
"""Where to die and at the how-manieth time; who comes to a place often looks here first."""


def arm(environment: Mapping[str, str] = os.environ) -> None:
    """Take over what the environment asks for; a process calls it once, at its start.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown place or a count that is no number above 0.
    """
    armed.clear()
    asked = environment.get(VARIABLE, "")
    if asked:
        point, count = _parsed(asked)
        armed[point] = count


def hit(point: FaultPoint) -> None:
    """Die here, if this process was told to."""
    if point in armed:
        armed[point] -= 1
        if not armed[point]:
            os.kill(os.getpid(), signal.SIGKILL)


def _parsed(asked: str) -> tuple[FaultPoint, int]:
    name, _, count = asked.partition(":")
    if name not in set(FaultPoint) or not (count or "1").isdecimal() or not int(count or "1"):
        places = ", ".join(FaultPoint)
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{VARIABLE}={asked}: give a place and the how-manieth time, such as "
            f"journal_committed:3; the places are {places}",
        )
    return FaultPoint(name), int(count or "1")
