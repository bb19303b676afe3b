"""Filtering: what of a whole group is trained on, by the filters of the recipe in their order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from astraflow.core.algorithms.faults import Faults
from astraflow.core.algorithms.finding import rollout_filter
from astraflow.core.algorithms.plug_in import PlugInSpec
from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """What is left of a group.

    Attributes:
        kept: To be trained on.
        dropped: By the name of the filter that dropped them.
    """

    kept: tuple[Sample, ...]
    dropped: Mapping[str, tuple[Sample, ...]]


class Filtering:
    """The filters of one policy."""

    def __init__(self, specs: Sequence[PlugInSpec], faults: Faults) -> None:
        """Make them.

        Raises:
            AstraflowError: CODE_UNKNOWN, INVALID_FIELD as `finding.make`.
        """
        self._filters = [(spec.name, rollout_filter(spec)) for spec in specs]
        self._faults = faults
        self._group_count = 0
        self._dropped_groups = Counter[str]()
        self._dropped_rollouts = Counter[str]()

    def sift(self, group: WholeGroup) -> Sifted:
        """Let every filter drop what it does not keep, until nothing is left."""
        dropped: dict[str, tuple[Sample, ...]] = {}
        self._group_count += 1
        for name, each in self._filters:
            if not group.samples:
                break
            mask = self._mask(name, each, group)
            kept = tuple(s for s, is_kept in zip(group.samples, mask, strict=True) if is_kept)
            gone = tuple(s for s, is_kept in zip(group.samples, mask, strict=True) if not is_kept)
            if gone:
                dropped[name] = dropped.get(name, ()) + gone
            self._dropped_groups[name] += not kept
            self._dropped_rollouts[name] += len(gone)
            group = replace(group, samples=kept)
        return Sifted(kept=group.samples, dropped=dropped)

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
            found |= {f"{place}/{key}": float(v) for key, v in each.metrics().items()}
        return found

    def _mask(self, name: str, each: RolloutFilter, group: WholeGroup) -> Sequence[bool]:
        everything = [True] * len(group.samples)
        mask = self._faults.call(f"filter {name}", everything, each.keeps, group)
        if len(mask) != len(group.samples):
            what = f"{len(mask)} answers for {len(group.samples)} samples"
            self._faults.note(f"filter {name}", what)
            return everything
        return mask
