"""The verdict: what members know of a run against what its hub says at the end."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from astraflow.config.loader import load_recipe
from astraflow.core.rollouts import Disposition
from astraflow.core.status import RolloutPlace, RolloutRecord
from astraflow.dataflow.recovery import beginning_of, replay
from astraflow.launch.ledger import read_ledger
from astraflow.storage.reader import JournalReader
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
    """

    faults: tuple[str, ...]
    acked: int
    trained: int
    undone: int


def judge(scene: Scene, *, step_count: int) -> Verdict:
    """Compare what nodes and trainers noted with the journal."""
    acked = {
        row["id"]
        for row in notes(scene.acked)
        if row["disposition"] in (Disposition.ACCEPTED, Disposition.DUPLICATE) and "/" in row["id"]
    }
    steps, undone = _lineage(scene)
    records = {each.rollout.rollout_id: each for each in asyncio.run(_records(scene))}
    faults = [
        *_lost(acked, records),
        *_twice(steps),
        *_other_than_trained(steps, records),
        *_books(scene),
    ]
    if len(steps) != step_count:
        faults.append(f"{len(steps)} of {step_count} steps count")
    trained = sum(len(rollouts) for rollouts in steps)
    return Verdict(faults=tuple(faults), acked=len(acked), trained=trained, undone=undone)


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


async def _records(scene: Scene) -> tuple[RolloutRecord, ...]:
    reader = JournalReader(scene.run_dir.journal)
    try:
        begin = beginning_of(load_recipe(scene.run_dir.recipe, ()))
        replica = await replay(reader, scene.run_dir.snapshot, begin)
    finally:
        reader.close()
    return () if replica is None else tuple(replica.run.rollouts())


def _lost(acked: set[str], records: dict[str, RolloutRecord]) -> list[str]:
    return [f"{name} was acknowledged and is lost" for name in sorted(acked - records.keys())]


def _twice(steps: list[list[str]]) -> list[str]:
    counts = Counter(name for rollouts in steps for name in rollouts)
    return [f"{name} is in {count} batches" for name, count in counts.items() if count > 1]


def _other_than_trained(steps: list[list[str]], records: dict[str, RolloutRecord]) -> list[str]:
    """Compare what the trainer knows with what the hub says is trained on."""
    mine = {name for rollouts in steps for name in rollouts}
    its = {
        name
        for name, record in records.items()
        if any(place.place is RolloutPlace.TRAINED for place in record.placements)
    }
    return [f"{name} is trained on for one side only" for name in sorted(mine ^ its)]


def _books(scene: Scene) -> list[str]:
    ledger = asyncio.run(read_ledger(scene.run_dir))
    faults = [fault for check in ledger.checks for fault in check.faults]
    (account,) = ledger.accounts
    faults += [f"{name} is left in the books" for name in _LIVE if getattr(account, name)]
    return faults if account.policy_id == POLICY else [f"no books of {POLICY}"]
