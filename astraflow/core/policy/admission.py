"""Admission: how much work may be open, and how new its versions must be.

A version has the optimizer steps of `steps_per_version` batches, one unless the recipe says more.
With `max_staleness` S, N steps per version and B groups per batch, work that is B * N * (S + 1)
groups ahead of the trainer would be S + 1 versions old when its turn comes: so no more than that
is open at once. Nor is work that needs a version which takes another batch: were groups of that
batch dropped, as by a filter, what takes their place would wait for that version, too, and nobody
would make it. Where versions are only published when they are asked for (N is None), none comes but
the one that was asked for.

Example:
    B = 16, N = 1, S = 2, newest version 7 of 7 steps, one batch leased, 20 groups waiting behind
    it. The batch in the trainer's hands makes version 8, so the next batch trains on 8. The new
    group has 20 groups, one whole batch, before it: it is trained on version 9 and must be
    sampled from version 7 or newer. With N = 4 all three batches are trained on version 7, whose
    four steps they are, and the new group may be sampled from version 5. So 12 batches may be open
    after step 7, and 11 after step 8: a twelfth would train on version 10 and have to be sampled
    from version 8, which the batches of steps 9 to 11 make.
"""

from astraflow.core.policy.leases import LeaseTable
from astraflow.core.settings import PolicySettings
from astraflow.core.versions import VersionLedger


class PolicyProgress:
    """The steps and the versions of one policy.

    Attributes:
        versions: What was published.
        step: Optimizer steps acknowledged.
        consumed_count: Batches trained on.
        is_requested: Whether somebody asked for a version that has not come.
        is_ordered: Whether its trainer was asked for it.
        step_count: Batches to train on; None: until the data ends.
    """

    def __init__(
        self, settings: PolicySettings, lease_table: LeaseTable, *, kept_version_count: int
    ) -> None:
        self.versions = VersionLedger(settings.policy_id, kept_count=kept_version_count)
        self.step = 0
        self.consumed_count = 0
        self.is_requested = False
        self.is_ordered = False
        self.step_count = settings.step_count
        self._settings = settings
        self._lease_table = lease_table
        self._is_restoring = False

    @property
    def train_version(self) -> int:
        """Number of the weights that the next batch trains on; 0 before the first publication."""
        return self.versions.weights_number(max(0, self.coming_version))

    @property
    def coming_version(self) -> int:
        """Newest version that comes without a batch that is not leased yet; -1: none does."""
        return self._version_after(len(self._lease_table.leases))

    @property
    def steps_since_version(self) -> int:
        """Acknowledged steps that make no version yet, and are part of the next one."""
        newest, per_version = self.versions.newest, self._settings.steps_per_version
        if newest is None or per_version is None or self._is_restoring:
            return 0
        return max(0, self.step - newest.step) % per_version

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
        steps = self.step_count
        return None if steps is None else max(0, steps - self.consumed_count)

    @property
    def oldest_to_restore(self) -> int:
        """Number of the oldest weights that are new enough once lost weights are restored."""
        # A version more would come of weights that are restored.
        newest = self.versions.weights_number(self.versions.next_version)
        return newest - self._settings.max_staleness

    def min_version(self, *, batches_ahead: int) -> int:
        """Return the oldest version to sample from for a batch with others before it."""
        leased_count = len(self._lease_table.leases)
        version = max(0, self._version_after(leased_count, batches_ahead=batches_ahead))
        oldest = self.versions.weights_number(version) - self._settings.max_staleness
        return self.versions.oldest_with(max(0, oldest))

    @property
    def can_order(self) -> bool:
        """Whether a version that was asked for may come now: no batch that is leased is too old."""
        newest = self.versions.newest
        if not self.is_requested or self.is_ordered or newest is None or self.step <= newest.step:
            return False
        oldest = self.oldest_to_restore
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
        """Return the version that a batch trains on which is leased after others.

        Args:
            leased_batch_count: Batches in the trainer's hands; each makes a step.
            batches_ahead: Batches that are leased before it.
        """
        newest, per_version = self.versions.newest, self._settings.steps_per_version
        if newest is None:
            return batches_ahead // (per_version or 1) or -1
        newest_step = self.step if self._is_restoring else newest.step
        steps = max(0, self.step + leased_batch_count - newest_step) + batches_ahead
        made = 0 if per_version is None else steps // per_version
        return newest.version + self._is_restoring + max(made, self.is_requested and steps > 0)
