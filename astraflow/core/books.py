"""Books: in which place every sample of a policy is, counted.

A sample is in exactly one place. It enters by `issue`, moves, and stays where it ends:
trained, or dropped for a reason. So the counts add up by construction, and `move` refuses
to take from a place what is not there.
"""

from collections import Counter

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.status import DropCount, LedgerAccount, RolloutPlace


class Books:
    """The counts of one policy, in samples.

    Attributes:
        reissued: Issues after the first.
        duplicates: Items that repeated what had been accepted.
        replayed: Uses of trained samples after the first.
    """

    def __init__(self, policy_id: PolicyId) -> None:
        self._policy_id = policy_id
        self._issued = 0
        self._places = dict.fromkeys(RolloutPlace, 0)
        self._drops = Counter[tuple[Reason, str]]()
        self.reissued = 0
        self.duplicates = 0
        self.replayed = 0

    def issue(self, count: int) -> None:
        """Enter samples as in flight."""
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

    def count(self, place: RolloutPlace) -> int:
        """Return how many samples are in a place."""
        return self._places[place]

    @property
    def drops(self) -> tuple[DropCount, ...]:
        """Samples dropped, by reason."""
        return tuple(
            DropCount(reason=reason, filter=by, count=count)
            for (reason, by), count in sorted(self._drops.items())
        )

    def account(self) -> LedgerAccount:
        """Return the books at this instant."""
        return LedgerAccount(
            policy_id=self._policy_id,
            issued_count=self._issued,
            in_flight_count=self._places[RolloutPlace.IN_FLIGHT],
            waiting_count=self._places[RolloutPlace.WAITING],
            fresh_count=self._places[RolloutPlace.FRESH],
            leased_count=self._places[RolloutPlace.LEASED],
            trained_count=self._places[RolloutPlace.TRAINED],
            drops=self.drops,
            reissued_count=self.reissued,
            duplicate_count=self.duplicates,
            replayed_count=self.replayed,
        )
