"""The verdict: what members know of a run against what its hub says at the end."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.config.loader import load_recipe
from astraflow.core.effects import Decision, SendTask
from astraflow.core.errors import Reason
from astraflow.core.events import Event, RolloutArrived
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import Disposition
from astraflow.core.status import RolloutPlace
from astraflow.dataflow.audit import Audit
from astraflow.dataflow.recovery import beginning_of, replay
from astraflow.launch.ledger import read_ledger
from astraflow.storage.snapshot import SnapshotFile
from crash_ends.archive import Archive
from crash_ends.scene import POLICY, Scene, notes

_LIVE = ("in_flight_count", "waiting_count", "fresh_count", "leased_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a run.

    Attributes:
        faults: Everything that is not as it has to be; empty: nothing.
        acked: Rollouts that nodes know to be safe.
        trained: Rollouts in the batches that count.
        undone: Batches that were trained on and do not count, because their trainer died.
        stale: Rollouts that were accepted and dropped as too old, of the last that the run lists.
    """

    faults: tuple[str, ...]
    acked: int
    trained: int
    undone: int
    stale: tuple[str, ...]


def judge(scene: Scene, archive: Archive, *, step_count: int) -> Verdict:
    """Compare what nodes and trainers noted with the journal."""
    acked = [row for row in notes(scene.acked) if "/" in row["id"]]
    steps, undone = _lineage(scene)
    found, stale = asyncio.run(_against_journal(scene, archive, acked, steps))
    faults = [*_twice(steps), *found]
    if len(steps) != step_count:
        faults.append(f"{len(steps)} of {step_count} steps count")
    trained = sum(len(rollouts) for rollouts in steps)
    accepted = {row["id"] for row in acked if row["disposition"] == Disposition.ACCEPTED}
    return Verdict(
        faults=tuple(faults), acked=len(accepted), trained=trained, undone=undone, stale=stale
    )


def _lineage(scene: Scene) -> tuple[list[list[str]], int]:
    """Return the rollouts of each step that counts, and the number of those that do not."""
    steps: list[list[str]] = []
    undone = 0
    for row in notes(scene.trained):
        if "starts_at" in row:
            undone += len(steps) - row["starts_at"]
            del steps[row["starts_at"] :]
        elif "rollouts" in row:
            steps.append(row["rollouts"])
    return steps, undone


def _twice(steps: list[list[str]]) -> list[str]:
    counts = Counter(name for rollouts in steps for name in rollouts)
    return [f"{name} is in {count} batches" for name, count in counts.items() if count > 1]


class _Samples:
    """Which group each task is of, and which samples were accepted."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        self._accepted: dict[tuple[str, int], str] = {}

    def look(self, event: Event, decision: Decision) -> None:
        """Take note of an event."""
        for effect in decision.effects:
            if isinstance(effect, SendTask):
                self._groups[effect.task.task_id] = effect.task.group_id
        if isinstance(event, RolloutArrived):
            rollout = event.rollout
            if decision.answer.disposition is Disposition.ACCEPTED:
                sample = (rollout.group_id, rollout.sample_index)
                self._accepted[sample] = rollout.rollout_id

    def have(self, row: Mapping[str, str]) -> bool:
        """Whether what a node was told is so: a duplicate may be of another attempt."""
        task_id, _, index = row["id"].rpartition("/")
        kept = self._accepted.get((self._groups[task_id], int(index)))
        match row["disposition"]:
            case Disposition.ACCEPTED:
                return kept == row["id"]
            case Disposition.DUPLICATE:
                return kept is not None
            case _:
                return True


async def _against_journal(
    scene: Scene, archive: Archive, acked: list[dict[str, str]], steps: list[list[str]]
) -> tuple[list[str], tuple[str, ...]]:
    """Replay every record that ever was, and compare; return faults, and what was too old."""
    audit, samples = Audit(), _Samples()

    def look(event: Event, decision: Decision) -> None:
        audit.record(event, decision)
        samples.look(event, decision)

    begin = beginning_of(load_recipe(scene.run_dir.recipe, ()))
    replica = await replay(archive, SnapshotFile(scene.root / "no snapshot"), begin, observe=look)
    if replica is None:
        return ["there is no journal"], ()
    ledger = await read_ledger(scene.run_dir)
    (account,) = replica.run.accounts()
    mine = {name for rollouts in steps for name in rollouts}
    other = mine ^ audit.trained(PolicyId(POLICY))
    faults = [fault for check in audit.checks(replica.run) for fault in check.faults]
    faults += [f"{row} is lost" for row in acked if not samples.have(row)]
    faults += [f"{name} is trained on for one side only" for name in sorted(other)]
    faults += [f"{name} is left in the books" for name in _LIVE if getattr(account, name)]
    faults += [fault for check in ledger.checks for fault in check.faults]
    if ledger.accounts != (account,):
        faults.append(f"the snapshot and the journal differ: {ledger.accounts} is not {account}")
    stale = (
        each.rollout.rollout_id
        for each in replica.run.rollouts()
        for placed in each.placements
        if placed.place is RolloutPlace.DROPPED and placed.reason is Reason.STALE
    )
    return faults, tuple(stale)
