"""Selections: which of the kept rollouts are wanted."""

from dataclasses import dataclass

from astraflow.core.rollouts import Outcome
from astraflow.core.status import RolloutPlace, RolloutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters of a list of rollouts; what is empty or None selects all.

    A policy together with a place or a batch means: there, for that policy.
    """

    policy_id: str = ""
    prompt_id: str = ""
    group_id: str = ""
    batch_id: str = ""
    rollout_id: str = ""
    member_id: str = ""
    places: tuple[RolloutPlace, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None

    def __contains__(self, record: RolloutRecord) -> bool:
        rollout = record.rollout
        ids = (
            (self.prompt_id, record.prompt_id),
            (self.group_id, rollout.group_id),
            (self.rollout_id, rollout.rollout_id),
            (self.member_id, record.member_id),
        )
        return (
            all(wanted in ("", has) for wanted, has in ids)
            and (not self.outcomes or rollout.outcome in self.outcomes)
            and self._is_placed(record)
            and self._is_rewarded(rollout.reward)
        )

    def _is_placed(self, record: RolloutRecord) -> bool:
        if not (self.policy_id or self.batch_id or self.places):
            return True
        return any(
            self.policy_id in ("", placement.policy_id)
            and self.batch_id in ("", placement.batch_id)
            and (not self.places or placement.place in self.places)
            for placement in record.placements
        )

    def _is_rewarded(self, reward: float | None) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        return (
            reward is not None
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
        )
