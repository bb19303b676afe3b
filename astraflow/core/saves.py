"""Saves: checkpoints of the whole run."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from astraflow.core.ids import PolicyId


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheckpoint:
    """One policy in a checkpoint.

    Attributes:
        policy_id: Which.
        step: Optimizer steps in it.
        version: Newest one then; None: none was published.
        fresh_group_count: Groups in its buffer when its trainer had saved.
    """

    policy_id: PolicyId
    step: int
    version: int | None
    fresh_group_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A checkpoint of the run: every trainer has saved under its id.

    Attributes:
        checkpoint_id: Of all its parts.
        policies: One per policy.
        drawn_counts: Prompts read by then, by data set.
        save_time: When the last trainer had saved.
    """

    checkpoint_id: str
    policies: tuple[PolicyCheckpoint, ...]
    drawn_counts: Mapping[str, int]
    save_time: datetime
