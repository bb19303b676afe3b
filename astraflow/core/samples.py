"""Samples: an accepted rollout as one policy trains on it, its record, and the groups it is in."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import nan

from astraflow.core.batches import BatchGroup
from astraflow.core.errors import Reason
from astraflow.core.ids import BatchId, MemberId, PolicyId, PromptId
from astraflow.core.rollouts import Rollout, Trajectory
from astraflow.core.status import RolloutPlace, RolloutPlacement, RolloutRecord

# tokens i32, logprobs f32 and sampled_mask bool
_NBYTES_PER_TOKEN = 9


@dataclass(slots=True, kw_only=True, eq=False)
class AcceptedRollout:
    """One accepted rollout; its placements move on while it lives, listed or not.

    Attributes:
        nbytes: Bytes of the arrays that are here.
    """

    rollout: Rollout
    prompt_id: PromptId
    member_id: MemberId
    placements: dict[PolicyId, RolloutPlacement]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        nbytes = 0
        for trajectory in self.rollout.trajectories:
            if trajectory.payload is None:
                nbytes += _NBYTES_PER_TOKEN * len(trajectory.tokens)
                # Routes through a large mixture take a hundred times what tokens do.
                for column in trajectory.columns.values():
                    nbytes += column.values.nbytes
        self.nbytes = nbytes


class RolloutRecords:
    """A window over the accepted rollouts, bounded by number and by bytes."""

    def __init__(self, *, max_count: int, max_nbytes: int) -> None:
        self._entries = deque[AcceptedRollout]()
        self._nbytes = 0
        self._max_count = max_count
        self._max_nbytes = max_nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: AcceptedRollout) -> None:
        """List a rollout, and forget the oldest ones beyond the bound."""
        self._entries.append(entry)
        self._nbytes += entry.nbytes
        while len(self._entries) > self._max_count or self._nbytes > self._max_nbytes:
            self._nbytes -= self._entries.popleft().nbytes

    def undo(self, policy_id: PolicyId, batch_ids: Set[BatchId]) -> None:
        """Note that batches count as not trained; what went elsewhere since is there."""
        for entry in self._entries if batch_ids else ():
            placed = entry.placements.get(policy_id)
            if placed and placed.place is RolloutPlace.TRAINED and placed.batch_id in batch_ids:
                entry.placements[policy_id] = RolloutPlacement(
                    policy_id=policy_id, place=RolloutPlace.DROPPED, reason=Reason.STALE
                )

    def newest_first(self) -> list[RolloutRecord]:
        return [
            RolloutRecord(
                rollout=entry.rollout,
                prompt_id=entry.prompt_id,
                member_id=entry.member_id,
                placements=tuple(entry.placements.values()),
            )
            for entry in reversed(self._entries)
        ]


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One trajectory on its way into a batch.

    Attributes:
        reward: Its own, else the rollout's; NaN: none.
        min_version: Oldest version of the row's own policy.
        max_version: Newest version of the row's own policy.
        advantage: Stamped when the group is whole.
        group_mean: Mean reward over the rows of the same agent in the group.
        group_std: Standard deviation of the same, of the population.
        use_count: Batches that it was trained on in.
        is_masked: Whether it counts for baselines alone: no token of it has a loss.
    """

    trajectory: Trajectory
    rollout: Rollout
    reward: float
    min_version: int
    max_version: int
    advantage: float = 0.0
    group_mean: float = nan
    group_std: float = nan
    use_count: int = 0
    is_masked: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One accepted rollout for one policy.

    Attributes:
        rows: The policy's trajectories in it.
        min_version: Oldest version of the policy in it, by `VersionLedger.weights_number`.
    """

    entry: AcceptedRollout
    rows: tuple[Row, ...]
    min_version: int

    @property
    def is_masked(self) -> bool:
        return any(row.is_masked for row in self.rows)


@dataclass(slots=True, kw_only=True, eq=False)
class FreshGroup:
    """A whole group for one policy: what a batch is made of.

    Attributes:
        head: How the batch names it.
        samples: Rewarded ones; fewer than asked for when the group shrank.
        arrival: Rises by one per whole group; breaks ties of the buffer.
    """

    head: BatchGroup
    samples: tuple[Sample, ...]
    number: int
    arrival: int

    @property
    def min_version(self) -> int:
        return min(sample.min_version for sample in self.samples)

    @property
    def nbytes(self) -> int:
        """Bytes of its rollouts, as `AcceptedRollout.nbytes`."""
        return sum(sample.entry.nbytes for sample in self.samples)


def rows_by_agent(rows: Iterable[Row]) -> Mapping[str, Sequence[Row]]:
    """Return the rows of a group by what their agent is in the workflow.

    Only rows of one agent had the same task, so that their rewards can be compared: not those of a
    first attempt with those of a second, which only rejected samples have.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.trajectory.agent, []).append(row)
    return found


def sample_of(entry: AcceptedRollout, policy_id: PolicyId) -> Sample | None:
    """Return what one policy trains on of a rollout; None: it has no sampled token of it."""
    rollout, rows = entry.rollout, list[Row]()
    for trajectory in rollout.trajectories:
        if trajectory.policy_id != policy_id:
            continue
        versions = [
            span.version
            for span in trajectory.version_spans
            if span.policy_id is None or span.policy_id == policy_id
        ]
        if not versions:
            continue
        reward = rollout.reward if trajectory.reward is None else trajectory.reward
        rows.append(
            Row(
                trajectory=trajectory,
                rollout=rollout,
                reward=nan if reward is None or rollout.reward is None else reward,
                min_version=min(versions),
                max_version=max(versions),
            )
        )
    if not rows:
        return None
    oldest = min([row.min_version for row in rows])
    return Sample(entry=entry, rows=tuple(rows), min_version=oldest)
