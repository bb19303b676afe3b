"""Completion: what of a whole group is trained on, and why the rest is not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from astraflow.core.advantages import AdvantageSettings, stamp
from astraflow.core.algorithms.faults import Faults
from astraflow.core.algorithms.finding import rollout_filter
from astraflow.core.algorithms.plug_in import PlugInSpec
from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.errors import Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.ids import PolicyId
from astraflow.core.samples import Sample
from astraflow.core.tasks import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Samples that are not trained on.

    Attributes:
        samples: Which.
        reason: Why.
        by: Name of the filter, with FILTERED.
    """

    samples: tuple[Sample, ...]
    reason: Reason
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a group came to.

    Attributes:
        kept: To be trained on, advantages stamped; empty: nothing is.
        drops: Everything else.
    """

    kept: tuple[Sample, ...]
    drops: tuple[Drop, ...]


class GroupCompletion:
    """Completes the groups of one policy: rewards, filters, size, advantages.

    Attributes:
        filtered_in_a_row: Groups that filters left nothing of, since the last one that was kept.
        last_filter: Which of them dropped the last one.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        filters: Sequence[PlugInSpec],
        *,
        min_group_size: int,
        advantages: AdvantageSettings,
        faults: Faults,
    ) -> None:
        """Make the filters.

        Raises:
            AstraflowError: CODE_UNKNOWN, INVALID_FIELD as `finding.make`.
        """
        self._policy_id = policy_id
        self._filters = [(spec.name, rollout_filter(spec)) for spec in filters]
        self._min_group_size = min_group_size
        self._advantages = advantages
        self._faults = faults
        self.filtered_in_a_row = 0
        self.last_filter = ""
        self._group_count = 0
        self._dropped_groups = Counter[str]()
        self._dropped_rollouts = Counter[str]()

    def complete(self, group: TrainGroup, *, train_version: int, run_time: timedelta) -> Completed:
        """Return what is kept of a group that is whole; its samples are taken out of it."""
        found = group.samples.pop(self._policy_id, {})
        samples = [sample for _, sample in sorted(found.items())]
        drops = [_unrewarded(sample) for sample in samples if not sample.is_rewarded]
        kept = tuple(sample for sample in samples if sample.is_rewarded)
        if kept and self._filters:
            whole = self._whole(group.prompt, kept, train_version, run_time)
            kept = self._sift(whole, drops)
        if len(kept) < self._min_group_size:
            drops.append(Drop(samples=kept, reason=Reason.GROUP_INCOMPLETE))
            return Completed(kept=(), drops=tuple(drops))
        stamp([row for sample in kept for row in sample.rows], self._advantages)
        return Completed(kept=kept, drops=tuple(drops))

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the log."""
        found: dict[str, float] = {}
        for name, each in self._filters:
            place, groups = f"data/filter/{name}", self._dropped_groups[name]
            found |= {
                f"{place}/groups_dropped": float(groups),
                f"{place}/groups_dropped_frac": groups / max(1, self._group_count),
                f"{place}/rollouts_dropped": float(self._dropped_rollouts[name]),
            }
            found |= self._faults.metrics(place, each)
        return found

    def _whole(
        self,
        prompt: Prompt,
        samples: tuple[Sample, ...],
        train_version: int,
        run_time: timedelta,
    ) -> WholeGroup:
        return WholeGroup(
            policy_id=self._policy_id,
            prompt=prompt,
            samples=samples,
            train_version=train_version,
            run_time=run_time,
        )

    def _sift(self, group: WholeGroup, drops: list[Drop]) -> tuple[Sample, ...]:
        """Let every filter drop what it does not keep, until nothing is left."""
        self._group_count += 1
        for name, each in self._filters:
            mask = self._mask(name, each, group)
            pairs = list(zip(group.samples, mask, strict=True))
            kept = tuple(sample for sample, is_kept in pairs if is_kept)
            gone = tuple(sample for sample, is_kept in pairs if not is_kept)
            drops.append(Drop(samples=gone, reason=Reason.FILTERED, by=name))
            self._dropped_rollouts[name] += len(gone)
            self._dropped_groups[name] += not kept
            group = replace(group, samples=kept)
            if not kept:
                self.filtered_in_a_row, self.last_filter = self.filtered_in_a_row + 1, name
                return kept
        self.filtered_in_a_row = 0
        return group.samples

    def _mask(self, name: str, each: RolloutFilter, group: WholeGroup) -> Sequence[bool]:
        everything = [True] * len(group.samples)
        mask = self._faults.call(f"filter {name}", everything, lambda: list(each.keeps(group)))
        if len(mask) != len(group.samples):
            what = f"{len(mask)} answers for {len(group.samples)} samples"
            self._faults.note(f"filter {name}", what)
            return everything
        return mask


def _unrewarded(sample: Sample) -> Drop:
    """Say why a rollout without a reward is not trained on."""
    failure = sample.entry.rollout.failure
    if failure is not None:
        return Drop(samples=(sample,), reason=failure.reason)
    return Drop(samples=(sample,), reason=Reason.FILTERED, by="no_reward")
