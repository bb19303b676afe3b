"""The laws, checked on a simulated run while it goes on and at its end."""

from collections import Counter
from dataclasses import dataclass, field

from astraflow.simulate.hub import SimulatedHub
from astraflow.simulate.samples import POLICY
from astraflow.simulate.trainer import SimulatedTrainer


@dataclass(slots=True, kw_only=True, eq=False)
class Laws:
    """Looks at the run and counts what breaks a law.

    Attributes:
        checked_count: Looks.
        broken: How often each law did not hold; empty: all held.
    """

    hub: SimulatedHub
    trainer: SimulatedTrainer
    max_staleness: int
    checked_count: int = 0
    broken: Counter[str] = field(default_factory=Counter[str])

    def check(self) -> None:
        """Look at the books, at how much is open, and at what was leased."""
        self.checked_count += 1
        run = self.hub.run
        status = run.status(self.hub.timeline.now).policies[0]
        books = run.accounts()[0]
        self._must("the books add up", books.is_balanced)
        self._must("open work is bounded", status.open_group_count <= status.max_open_group_count)
        stalest = max(status.staleness_counts, default=0)
        self._must("nothing is trained on that is too old", stalest <= self.max_staleness)
        self._must("versions grow by one", status.version == len(self.trainer.steps))
        in_batches = sum(count for _, _, count in self.trainer.steps)
        self._must("what was trained on is what batches had", status.trained_count == in_batches)

    def check_end(self) -> None:
        """Look at what only the whole run can tell."""
        self.check()
        twice = any(count > 1 for count in self.trainer.seen.values())
        self._must("a rollout is in one batch", not twice)
        books = self.hub.run.accounts()[0]
        group_size = self.hub.settings.rollouts.group_size
        self._must("groups are issued whole", books.issued_count % group_size == 0)
        self._must("no policy was forgotten", books.policy_id == POLICY)

    def _must(self, law: str, holds: bool) -> None:
        if not holds:
            self.broken[law] += 1
