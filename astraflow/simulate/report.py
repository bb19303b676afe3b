"""What came of a simulation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from astraflow.core.status import LedgerAccount
from astraflow.simulate.pools import ScaleStep, SizeChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Numbers of one simulated run.

    Attributes:
        hours: Simulated.
        wall_s: That it took.
        event_count: Events that the run decided.
        node_count: Nodes, a mean over time.
        node_hours: Paid for.
        step_count: Batches trained on.
        wait_fraction: Share of the trainer's time from the first batch on, 0 to 1.
        rollouts_per_s: Trained on.
        tokens_per_s: Sampled for them.
        staleness: Rollouts of the last batches, by versions between sampling and training.
        crash_count: Nodes that went silently.
        leave_count: Flapping nodes that left in order.
        books: At the end.
        law_checks: Times that the laws were looked at.
        broken_laws: How often each did not hold; empty: all held.
        scaling: What the scaler did.
        sizes: How many nodes there were.
        steps: Of each batch: when it was done, how long it was waited for, its rollouts.
    """

    hours: float
    wall_s: float
    event_count: int
    node_count: float
    node_hours: float
    step_count: int
    wait_fraction: float
    rollouts_per_s: float
    tokens_per_s: float
    staleness: Mapping[int, int]
    crash_count: int
    leave_count: int
    books: LedgerAccount
    law_checks: int
    broken_laws: Mapping[str, int]
    scaling: tuple[ScaleStep, ...] = ()
    sizes: tuple[SizeChange, ...] = ()
    steps: tuple[tuple[float, float, int], ...] = ()

    def size_at(self, seconds: float) -> int:
        """Return how many nodes there were at a time."""
        return [change.count for change in self.sizes if change.seconds <= seconds][-1]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; steps and sizes, which are long, are left out."""
        fields = asdict(self)
        del fields["sizes"], fields["steps"]
        fields["books"]["balanced"] = self.books.is_balanced
        return fields
