"""Sample accounting: in which place every sample of a policy is, counted and recorded.

A sample is in exactly one place. It enters by `issue`, moves, and stays where it ends:
trained, or dropped for a reason. So the counts add up by construction, and `move` refuses
to take from a place what is not there.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.policy.leases import Lease, TrainedBatch
from astraflow.core.samples import AcceptedRollout, Sample, sample_of
from astraflow.core.status import DropCount, LedgerAccount, RolloutPlace, RolloutPlacement


class Books:
    """Where the samples of one policy are: their counts, and their records."""

    # Not set by the constructor, so that snapshots of releases that did not count are read.
    _rolled_back = 0

    def __init__(self, policy_id: PolicyId) -> None:
        self._policy_id = policy_id
        self._issued = 0
        self._places = dict.fromkeys(RolloutPlace, 0)
        self._drops = Counter[tuple[Reason, str]]()
        self._reissued = 0
        self._duplicates = 0
        self._replayed = 0
        self._waiting = RolloutPlacement(policy_id=policy_id, place=RolloutPlace.WAITING)

    def issue(self, count: int) -> None:
        self._issued += count
        self._places[RolloutPlace.IN_FLIGHT] += count

    def move(self, source: RolloutPlace, target: RolloutPlace, count: int = 1) -> None:
        """Move samples on.

        Raises:
            AstraflowError: INTERNAL when fewer are in that place.
        """
        if self._places[source] < count:
            raise AstraflowError(
                Reason.INTERNAL,
                f"the books of {self._policy_id} have {self._places[source]} samples {source}, "
                f"not {count}; this is a defect",
            )
        self._places[source] -= count
        self._places[target] += count

    def drop(self, source: RolloutPlace, reason: Reason, count: int = 1, *, by: str = "") -> None:
        """Drop samples for a reason; `by` names the filter of FILTERED."""
        self.move(source, RolloutPlace.DROPPED, count)
        self._drops[reason, by] += count

    def note(self, *, reissued: int = 0, duplicates: int = 0) -> None:
        """Count what moves no sample.

        Args:
            reissued: Issues after the first.
            duplicates: Items that repeated what had been accepted.
        """
        self._reissued += reissued
        self._duplicates += duplicates

    def count(self, place: RolloutPlace) -> int:
        return self._places[place]

    @property
    def drops(self) -> tuple[DropCount, ...]:
        return tuple(
            DropCount(reason=reason, filter=by, count=count)
            for (reason, by), count in sorted(self._drops.items())
        )

    @property
    def drops_by_reason(self) -> Counter[Reason]:
        """Samples dropped, whichever filter it was."""
        found = Counter[Reason]()
        for (reason, _), count in self._drops.items():
            found[reason] += count
        return found

    def account(self) -> LedgerAccount:
        return LedgerAccount(
            policy_id=self._policy_id,
            issued_count=self._issued,
            in_flight_count=self._places[RolloutPlace.IN_FLIGHT],
            waiting_count=self._places[RolloutPlace.WAITING],
            fresh_count=self._places[RolloutPlace.FRESH],
            leased_count=self._places[RolloutPlace.LEASED],
            trained_count=self._places[RolloutPlace.TRAINED],
            drops=self.drops,
            rolled_back_count=self._rolled_back,
            reissued_count=self._reissued,
            duplicate_count=self._duplicates,
            replayed_count=self._replayed,
        )

    def accept(self, entry: AcceptedRollout) -> Sample | None:
        """Let what a rollout has for this policy wait for its group; None: it has nothing."""
        sample = sample_of(entry, self._policy_id)
        if sample is None:
            self._drop(RolloutPlace.IN_FLIGHT, [entry], Reason.FILTERED, "no_trajectory")
            return None
        self.move(RolloutPlace.IN_FLIGHT, RolloutPlace.WAITING)
        entry.placements[self._policy_id] = self._waiting
        return sample

    def move_all(
        self, samples: Sequence[Sample], source: RolloutPlace, target: RolloutPlace
    ) -> None:
        """Move samples on, and say so in their records."""
        self.move(source, target, len(samples))
        self._note(samples, target)

    def lease(self, lease: Lease) -> None:
        samples = lease.samples
        self.move(RolloutPlace.FRESH, RolloutPlace.LEASED, len(samples))
        self._note(samples, RolloutPlace.LEASED, batch_id=lease.batch_id)

    def drop_all(
        self, samples: Iterable[Sample], source: RolloutPlace, reason: Reason, *, by: str = ""
    ) -> None:
        """Drop samples for a reason; `by` names the filter or guard of FILTERED."""
        self._drop(source, [sample.entry for sample in samples], reason, by)

    def train(self, lease: Lease, *, step: int) -> None:
        fresh, replayed = lease.samples, lease.replayed_samples
        self.move(RolloutPlace.LEASED, RolloutPlace.TRAINED, len(fresh))
        self._replayed += len(replayed)
        by_version: dict[int, list[Sample]] = {}
        for sample in fresh + replayed:
            for row in sample.rows:
                row.use_count += 1
            by_version.setdefault(sample.min_version, []).append(sample)
        for version, same in by_version.items():
            self._note(
                same,
                RolloutPlace.TRAINED,
                batch_id=lease.batch_id,
                step=step,
                staleness=lease.train_version - version,
            )

    def untrain(self, batch: TrainedBatch) -> None:
        """Count the samples of a batch as leased again; what is too old to be used is dropped."""
        self.move(RolloutPlace.TRAINED, RolloutPlace.LEASED, batch.sample_count)
        self._rolled_back += batch.sample_count
        self._replayed -= batch.replayed_count
        if batch.lease is None:
            self.drop(RolloutPlace.LEASED, Reason.STALE, batch.sample_count)
            return
        for row in batch.lease.rows:
            row.use_count -= 1

    def note_use(self, samples: Iterable[Sample], batch: TrainedBatch) -> None:
        """Say in which batch samples were trained on last, for a later one does not count."""
        for sample in samples:
            lease = batch.lease
            self._note(
                [sample],
                RolloutPlace.TRAINED,
                batch_id=batch.batch_id,
                step=batch.step,
                staleness=None if lease is None else lease.train_version - sample.min_version,
            )

    def _note(self, samples: Iterable[Sample], place: RolloutPlace, **where: Any) -> None:
        """Say in the records of samples where they stand; those that stand alike share it."""
        shared: dict[int, RolloutPlacement] = {}
        for sample in samples:
            use_count = sample.rows[0].use_count
            placement = shared.get(use_count)
            if placement is None:
                placement = shared[use_count] = RolloutPlacement(
                    policy_id=self._policy_id, place=place, use_count=use_count, **where
                )
            sample.entry.placements[self._policy_id] = placement

    def _drop(
        self, source: RolloutPlace, entries: Sequence[AcceptedRollout], reason: Reason, by: str
    ) -> None:
        if entries:
            self.drop(source, reason, len(entries), by=by)
        placement = RolloutPlacement(
            policy_id=self._policy_id, place=RolloutPlace.DROPPED, reason=reason, filter=by
        )
        for entry in entries:
            entry.placements[self._policy_id] = placement
