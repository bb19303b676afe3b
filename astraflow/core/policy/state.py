"""The policies of a run: how far each is, where its samples are, and when its data ends."""

from collections.abc import Mapping
from datetime import datetime

from astraflow.core.algorithms.finding import Faults
from astraflow.core.batches import AckBatch, EndCause
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import ModelIdentity
from astraflow.core.policy.admission import PolicyProgress
from astraflow.core.policy.leases import Lease, LeaseTable, Lineage, TrainedBatch
from astraflow.core.policy.metrics import ConsumedBatch, Window, time_metrics
from astraflow.core.policy.sample_flow import SampleFlow
from astraflow.core.settings import PolicySettings, RunSettings


class PolicyState:
    """The state of one policy.

    Attributes:
        lease_table: Batches at the trainer.
        metrics: Of the last batch that was trained on.
        identity: Of its model, once a member named it.
        end: Why its data ended; None: it goes on.
        load_failure: Why a RaaS could not load a version, the last one.
        departure_time: When its last trainer was last seen; None: it has one, or never had.
    """

    def __init__(self, settings: PolicySettings, run: RunSettings, *, faults: Faults) -> None:
        self.settings = settings
        self.policy_id = settings.policy_id
        self.lease_table = LeaseTable(settings.policy_id)
        self.progress = PolicyProgress(
            settings, self.lease_table, kept_version_count=run.kept_version_count
        )
        self.versions = self.progress.versions
        self.lineage = Lineage(settings.policy_id)
        self.samples = SampleFlow(
            settings,
            run,
            progress=self.progress,
            lease_table=self.lease_table,
            lineage=self.lineage,
            faults=faults,
        )
        self.window = Window()
        self.metrics: Mapping[str, float] = {}
        self.identity = ModelIdentity()
        self.end: EndCause | None = None
        self.end_time: datetime | None = None
        self.load_failure: Failure | None = None
        self.departure_time: datetime | None = None

    def reclaim(self, lease: Lease) -> bool:
        """Lease again what a lost lease held; False when it cannot be trained on any more."""
        return self.end is None and self.samples.reclaim(lease)

    def put_back(self, lease: Lease) -> None:
        if self.end is None:
            self.samples.put_back(lease)
        else:
            self.samples.drop_leased(lease, Reason.RUN_ENDED)

    def consume(
        self, lease: Lease, ack: AckBatch, now: datetime, *, metrics: Mapping[str, float]
    ) -> ConsumedBatch:
        """Count the groups of a batch as trained; return what the window keeps of it."""
        self.samples.train(lease, self.progress.note_batch(ack.step))
        consumed = lease.consumed(now, wait_s=ack.wait_s, train_s=ack.train_s)
        self.window.add(consumed)
        self.metrics = {
            **lease.metrics,
            **time_metrics(consumed.token_count, wait_s=ack.wait_s, train_s=ack.train_s),
            **self.samples.metrics(),
            **metrics,
        }
        return consumed

    def roll_back(self, count: int, step: int) -> list[TrainedBatch]:
        """Count the last batches as not trained: their weights are lost.

        What is new enough goes back to the buffer as far as groups may be open; the rest is
        dropped. The next version is that of the weights which are left.

        Returns:
            Those that were rolled back, newest first; none when the data has ended.
        """
        if self.end is not None:
            return []
        undone = self.lineage.cut(count)
        # Who names a checkpoint need not say how many steps are behind it.
        self.progress.roll_back(len(undone), step or self.lineage.step)
        self.samples.untrain(undone)
        return undone

    def retire(self, cause: EndCause, now: datetime) -> None:
        """End the data: what is in the buffer is dropped."""
        self.samples.close()
        self.end, self.end_time = cause, now


def find_policy(policies: Mapping[PolicyId, PolicyState], policy_id: PolicyId) -> PolicyState:
    """Return a policy of a run.

    Raises:
        AstraflowError: POLICY_UNKNOWN.
    """
    policy = policies.get(policy_id)
    if policy is None:
        known = ", ".join(policies)
        raise AstraflowError(
            Reason.POLICY_UNKNOWN, f"the run has no policy '{policy_id}', only {known}"
        )
    return policy


def newest_versions(
    policies: Mapping[PolicyId, PolicyState], policy_ids: tuple[PolicyId, ...]
) -> dict[PolicyId, int] | None:
    """Return the newest version of each policy that the pool may see; None: one has none."""
    newest = {p: policies[p].versions.shown_version for p in policy_ids}
    return None if min(newest.values()) < 0 else newest
