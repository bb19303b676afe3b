"""Open groups: how many one policy has, and how many it may have."""

from astraflow.core.admission import open_limit
from astraflow.core.leases import LeaseTable
from astraflow.core.progress import PolicyProgress
from astraflow.core.replay import ReplayBuffer
from astraflow.core.settings import PolicySettings


class OpenGroups:
    """Groups of one policy with any sample that is in flight, waiting, fresh or leased.

    Attributes:
        count: How many there are.
    """

    def __init__(
        self,
        settings: PolicySettings,
        progress: PolicyProgress,
        desk: LeaseTable,
        replay: ReplayBuffer,
    ) -> None:
        """Begin with none.

        Args:
            settings: Of the policy.
            progress: Its steps and its versions.
            desk: Batches at its trainer.
            replay: What it may train on again.
        """
        self.count = 0
        self._settings = settings
        self._progress = progress
        self._lease_table = desk
        self._replay = replay

    @property
    def fresh_per_batch(self) -> int:
        """Fresh groups that the next batch takes; the rest of it is replayed."""
        if not self._replay.is_on:
            return self._settings.groups_per_batch
        again = self._replay.available(self._progress.train_version)
        return self._settings.groups_per_batch - again

    @property
    def limit(self) -> int:
        """Groups that may be open."""
        return open_limit(
            groups_per_batch=self.fresh_per_batch,
            max_staleness=self._settings.max_staleness,
            steps_left=self._progress.steps_left,
            steps_per_version=self._settings.steps_per_version,
        )

    @property
    def has_slot(self) -> bool:
        """Whether another group may be opened."""
        return self.count < self.limit

    @property
    def is_starving(self) -> bool:
        """Whether what is open makes no batch beside those in the trainer's hands."""
        return self.count - self._lease_table.leased_groups < self.fresh_per_batch

    def min_version(self, *, is_open: bool) -> int:
        """Return the oldest version that work issued now may be sampled from.

        Args:
            is_open: Whether the group is among the open ones already.
        """
        ahead = max(0, self.count - self._lease_table.leased_groups - is_open)
        return self._progress.min_version(batches_ahead=ahead // self.fresh_per_batch)
