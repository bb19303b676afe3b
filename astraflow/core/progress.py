"""Progress: how far a policy is in steps and versions, and what its next batch trains on."""

from astraflow.core.admission import min_version, train_version
from astraflow.core.leases import LeaseTable
from astraflow.core.settings import PolicySettings
from astraflow.core.version_ledger import VersionLedger


class PolicyProgress:
    """The steps and the versions of one policy.

    Attributes:
        versions: What was published.
        step: Optimizer steps acknowledged.
        consumed_count: Batches trained on.
        is_asked: Whether somebody asked for a version that has not come.
        is_ordered: Whether its trainer was told so.
    """

    def __init__(
        self, settings: PolicySettings, desk: LeaseTable, *, kept_version_count: int
    ) -> None:
        """Begin before the first version.

        Args:
            settings: Of the policy.
            desk: Batches at the trainer; each makes a step.
            kept_version_count: Versions that are remembered.
        """
        self.versions = VersionLedger(settings.policy_id, kept_count=kept_version_count)
        self.step = 0
        self.consumed_count = 0
        self.is_requested = False
        self.is_ordered = False
        self._settings = settings
        self._lease_table = desk
        self._is_restoring = False

    @property
    def train_version(self) -> int:
        """Version that the next batch trains on; before the first publication 0."""
        return max(0, self._version_after(len(self._lease_table.leases)))

    @property
    def next_version(self) -> int:
        """Version that comes of the next batch, or the same where it makes none."""
        return self._version_after(len(self._lease_table.leases) + 1)

    @property
    def made_version(self) -> int:
        """Version that the acknowledged steps make; -1: not even the first one."""
        return self._version_after(0)

    @property
    def has_more(self) -> bool:
        """Whether a version published now, or after the step in progress, had more steps."""
        newest = self.versions.newest
        return newest is None or self.step + len(self._lease_table.leases) > newest.step

    @property
    def steps_left(self) -> int | None:
        """Batches still to be trained on; None: no limit."""
        steps = self._settings.step_count
        return None if steps is None else max(0, steps - self.consumed_count)

    @property
    def oldest_to_restore(self) -> int:
        """Oldest version whose samples are new enough once lost weights are restored."""
        # A version more would come of weights that are restored.
        return self.versions.newest_version + 1 - self._settings.max_staleness

    def min_version(self, *, batches_ahead: int) -> int:
        """Return the oldest version to sample from for a batch with others before it."""
        train_version = self._version_after(
            len(self._lease_table.leases), batches_ahead=batches_ahead
        )
        return min_version(
            train_version=max(0, train_version), max_staleness=self._settings.max_staleness
        )

    @property
    def can_order(self) -> bool:
        """Whether a version that was asked for may come now: no batch that is leased is too old."""
        newest = self.versions.newest
        if not self.is_requested or self.is_ordered or newest is None or self.step <= newest.step:
            return False
        oldest = newest.version + 1 - self._settings.max_staleness
        return all(lease.min_version >= oldest for lease in self._lease_table.leases.values())

    def note_batch(self, step: int) -> int:
        """Note that a batch was trained on; return the steps done.

        Args:
            step: Optimizer steps with it, as the trainer says; no more than before: one more.
        """
        self.step = step if step > self.step else self.step + 1
        self.consumed_count += 1
        return self.step

    def note_version(self) -> None:
        """Note that a version was published, be it asked for or that of weights restored."""
        self.is_requested = self.is_ordered = self._is_restoring = False

    def roll_back(self, count: int, step: int) -> None:
        """Note that so many batches count as not trained, and so many steps are left."""
        newest = self.versions.newest
        self.step = step
        self.consumed_count -= count
        self._is_restoring = newest is not None and newest.step > step

    def _version_after(self, leased_batch_count: int, *, batches_ahead: int = 0) -> int:
        newest = self.versions.newest
        if newest is None:
            return batches_ahead // (self._settings.steps_per_version or 1) or -1
        is_restoring = self._is_restoring
        return train_version(
            newest=newest.version + is_restoring,
            newest_step=self.step if is_restoring else newest.step,
            step=self.step,
            leased_batch_count=leased_batch_count,
            batches_ahead=batches_ahead,
            steps_per_version=self._settings.steps_per_version,
            is_asked=self.is_requested,
        )
