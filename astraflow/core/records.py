"""Records: the newest rollouts, and what became of each, within a bound."""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from astraflow.core.errors import Reason
from astraflow.core.ids import BatchId, MemberId, PolicyId, PromptId
from astraflow.core.rollouts import Rollout
from astraflow.core.status import RolloutPlace, RolloutPlacement, RolloutRecord

# tokens i32, logprobs f32 and sampled_mask bool
_NBYTES_PER_TOKEN = 9


@dataclass(slots=True, kw_only=True, eq=False)
class AcceptedRollout:
    """One accepted rollout; its placements move on while it lives, listed or not.

    Attributes:
        nbytes: Bytes of its tokens.
    """

    rollout: Rollout
    prompt_id: PromptId
    member_id: MemberId
    placements: dict[PolicyId, RolloutPlacement]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        count = 0
        for trajectory in self.rollout.trajectories:
            count += len(trajectory.tokens)
        self.nbytes = _NBYTES_PER_TOKEN * count


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
        """Return what is listed."""
        return [
            RolloutRecord(
                rollout=entry.rollout,
                prompt_id=entry.prompt_id,
                member_id=entry.member_id,
                placements=tuple(entry.placements.values()),
            )
            for entry in reversed(self._entries)
        ]
