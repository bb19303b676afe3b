"""Placing: samples move through the places of the books, and their records say where."""

from collections.abc import Iterable, Sequence
from typing import Any

from astraflow.core.books import Books
from astraflow.core.errors import Reason
from astraflow.core.ids import PolicyId
from astraflow.core.leases import Lease
from astraflow.core.lineage import TrainedBatch
from astraflow.core.records import AcceptedRollout
from astraflow.core.samples import Sample, sample_of
from astraflow.core.status import RolloutPlace, RolloutPlacement


class SampleAccounting:
    """Where the samples of one policy are.

    Attributes:
        books: Their counts.
    """

    def __init__(self, policy_id: PolicyId) -> None:
        self.books = Books(policy_id)
        self._policy_id = policy_id
        self._waiting = RolloutPlacement(policy_id=policy_id, place=RolloutPlace.WAITING)

    def accept(self, entry: AcceptedRollout) -> Sample | None:
        """Let what a rollout has for this policy wait for its group; None: it has nothing."""
        sample = sample_of(entry, self._policy_id)
        if sample is None:
            self.books.drop(RolloutPlace.IN_FLIGHT, Reason.FILTERED, by="no_trajectory")
            self._note_drop(entry, Reason.FILTERED, "no_trajectory")
            return None
        self.books.move(RolloutPlace.IN_FLIGHT, RolloutPlace.WAITING)
        entry.placements[self._policy_id] = self._waiting
        return sample

    def move(self, samples: Sequence[Sample], source: RolloutPlace, target: RolloutPlace) -> None:
        """Move samples on."""
        self.books.move(source, target, len(samples))
        self._note(samples, target)

    def lease(self, lease: Lease) -> None:
        """Count the fresh samples of a batch as leased."""
        self.books.move(RolloutPlace.FRESH, RolloutPlace.LEASED, len(lease.samples))
        self._note(lease.samples, RolloutPlace.LEASED, batch_id=lease.batch_id)

    def drop(
        self, samples: Iterable[Sample], source: RolloutPlace, reason: Reason, *, by: str = ""
    ) -> None:
        """Drop samples for a reason; `by` names the filter or guard of FILTERED."""
        for sample in samples:
            self.books.drop(source, reason, by=by)
            self._note_drop(sample.entry, reason, by)

    def train(self, lease: Lease, *, step: int) -> None:
        """Count the samples of a batch as trained in a step, fresh and replayed ones."""
        self.books.move(RolloutPlace.LEASED, RolloutPlace.TRAINED, len(lease.samples))
        self.books.replayed += len(lease.replayed_samples)
        for row in lease.rows:
            row.use_count += 1
        samples = lease.samples + lease.replayed_samples
        by_version: dict[int, list[Sample]] = {}
        for sample in samples:
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
        self.books.move(RolloutPlace.TRAINED, RolloutPlace.LEASED, batch.sample_count)
        self.books.replayed -= batch.replayed_count
        if batch.lease is None:
            self.books.drop(RolloutPlace.LEASED, Reason.STALE, batch.sample_count)
            return
        for row in batch.lease.rows:
            row.use_count -= 1

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

    def _note_drop(self, entry: AcceptedRollout, reason: Reason, by: str) -> None:
        entry.placements[self._policy_id] = RolloutPlacement(
            policy_id=self._policy_id, place=RolloutPlace.DROPPED, reason=reason, filter=by
        )
