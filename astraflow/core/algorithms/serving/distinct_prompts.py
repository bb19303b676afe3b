"""Distinct prompts: a batch has each prompt at most once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from astraflow.core.algorithms.points import BatchGuard
from astraflow.core.samples import FreshGroup


@dataclass(slots=True, kw_only=True)
class DistinctPrompts(BatchGuard):
    """Finds groups whose prompt is in the batch already. Example: of a, b, a the last one."""

    def unfit(self, groups: Sequence[FreshGroup]) -> Collection[int]:
        """Return the positions of repeated prompts."""
        first: dict[str, int] = {}
        for index, group in enumerate(groups):
            first.setdefault(group.head.prompt_id, index)
        return set(range(len(groups))) - set(first.values())
