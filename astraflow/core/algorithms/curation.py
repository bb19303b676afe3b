"""Curation: which prompts are asked, what of a group is trained on, which batches are refused."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isnan

from astraflow.core.algorithms.advantages import stamp
from astraflow.core.algorithms.finding import Faults, make
from astraflow.core.algorithms.points import (
    BatchGuard,
    Dice,
    GroupOutcome,
    PromptSelector,
    RolloutFilter,
    WholeGroup,
)
from astraflow.core.errors import Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.ids import PolicyId
from astraflow.core.samples import FreshGroup, Sample
from astraflow.core.settings import AdvantageSettings, MixPhaseSettings, PlugInSpec
from astraflow.core.tasks import Prompt


class Mixing:
    """Chooses data sets by the weights of the phase that a version is in.

    Attributes:
        counts: Prompts of this phase, by data set.
    """

    def __init__(self, phases: Collection[MixPhaseSettings]) -> None:
        self._phases = sorted(phases, key=lambda phase: phase.from_version)
        self._phase = self._phases[0]
        self.counts = Counter[str]()

    def begin_version(self, version: int) -> None:
        """Count anew where the next phase begins."""
        phase = [each for each in self._phases if each.from_version <= max(0, version)][-1]
        if phase is not self._phase:
            self._phase = phase
            self.counts.clear()

    def weights(self, there: Collection[str]) -> dict[str, float]:
        """Return the shares of those that are not through, which add up to 1.

        Where none of them has a weight in this phase, all get the same.
        """
        wanted = {name: weight for name, weight in self._phase.weights.items() if name in there}
        if not sum(wanted.values()):
            wanted = dict.fromkeys(sorted(there), 1.0)
        total = sum(wanted.values())
        return {name: weight / total for name, weight in wanted.items() if weight}

    def choose(self, there: Collection[str]) -> str:
        """Return the data set of the next prompt, at least one of which is there."""
        shares = self.weights(there)
        total = 1 + sum(self.counts[name] for name in shares)
        return max(shares, key=lambda name: shares[name] * total - self.counts[name])

    def metrics(self) -> dict[str, float]:
        """Return the share of each data set in this phase, by its name."""
        total = sum(self.counts.values())
        return {f"data/mix/{name}": count / total for name, count in self.counts.items()}


# Lessons that can be taken back.
_KEPT_LESSONS = 4096

_Named = list[tuple[str, PromptSelector]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lesson:
    """One thing that every selector was told; with neither field: that the warm-up is over.

    Attributes:
        number: Of the group.
        outcome: What it came to.
        version: That was published.
    """

    number: int | None = None
    outcome: GroupOutcome | None = None
    version: int | None = None


class Curator:
    """Asks all selectors of a recipe, and tells them what happened.

    Attributes:
        selectors: By their names, as the recipe names them.
    """

    def __init__(self, specs: Sequence[PlugInSpec], *, seed: int, faults: Faults) -> None:
        self.selectors: _Named = [(spec.name, make(PromptSelector, spec)) for spec in specs]
        self._before: _Named = [(spec.name, make(PromptSelector, spec)) for spec in specs]
        self._lessons = deque[_Lesson]()
        self._dice = Dice(seed=seed, salt="select")
        self._faults = faults

    def admits(self, prompt: Prompt) -> bool:
        return all(
            self._faults.call(f"selector {name}", True, each.admits, prompt, self._dice)
            for name, each in self.selectors
        )

    def note(self, number: int, outcome: GroupOutcome) -> None:
        self._learn(_Lesson(number=number, outcome=outcome))

    def begin_version(self, version: int) -> None:
        self._learn(_Lesson(version=version))

    def end_warm_up(self) -> None:
        self._learn(_Lesson())

    def forget(self, numbers: Collection[int]) -> None:
        """Let what groups taught count as not learned."""
        gone = frozenset(numbers)
        if not any(lesson.number in gone for lesson in self._lessons):
            return
        self._lessons = deque(each for each in self._lessons if each.number not in gone)
        self.selectors = deepcopy(self._before)
        for lesson in self._lessons:
            self._teach(self.selectors, lesson)

    def metrics(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for name, each in self.selectors:
            found |= self._faults.metrics(f"data/select/{name}", each)
        return found

    def _learn(self, lesson: _Lesson) -> None:
        if not self.selectors:
            return
        self._teach(self.selectors, lesson)
        outcome = lesson.outcome
        if outcome is not None and outcome.prompt.blobs:
            # Small enough to be kept.
            prompt = replace(outcome.prompt, blobs={})
            lesson = replace(lesson, outcome=replace(outcome, prompt=prompt))
        self._lessons.append(lesson)
        if len(self._lessons) > _KEPT_LESSONS:
            self._teach(self._before, self._lessons.popleft())

    def _teach(self, selectors: _Named, lesson: _Lesson) -> None:
        for name, each in selectors:
            if lesson.outcome is not None:
                self._faults.call(f"selector {name}", None, each.note, lesson.outcome)
            elif lesson.version is not None:
                self._faults.call(f"selector {name}", None, each.begin_version, lesson.version)
            else:
                self._faults.call(f"selector {name}", None, each.end_warm_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Samples that are not trained on.

    Attributes:
        by: Name of the filter, with FILTERED.
    """

    samples: tuple[Sample, ...]
    reason: Reason
    by: str = ""


class GroupCompletion:
    """Completes the groups of one policy: rewards, filters, size, advantages.

    Attributes:
        filtered_in_a_row: Groups that filters left too little of, since the last one that was kept.
        last_filter: Who dropped some of the last one of these: a filter, no_reward, or
            no_trajectory.
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
        self._policy_id = policy_id
        self._filters = [(spec.name, make(RolloutFilter, spec)) for spec in filters]
        self._min_group_size = min_group_size
        self._advantages = advantages
        self._faults = faults
        self.filtered_in_a_row = 0
        self.last_filter = ""
        self._group_count = 0
        self._dropped_groups = Counter[str]()
        self._dropped_rollouts = Counter[str]()

    def complete(
        self, group: TrainGroup, *, train_version: int, run_time: timedelta
    ) -> tuple[tuple[Sample, ...], list[Drop]]:
        """Take the samples out of a group that is whole.

        Returns:
            What is trained on, advantages stamped, and what is not.
        """
        found = group.samples.pop(self._policy_id, {})
        rewarded: list[Sample] = []
        drops: list[Drop] = []
        for _, sample in sorted(found.items()):
            failure = sample.entry.rollout.failure
            if not any(map(isnan, [row.reward for row in sample.rows])):
                rewarded.append(sample)
            elif failure is not None:
                drops.append(Drop(samples=(sample,), reason=failure.reason))
            else:
                drops.append(Drop(samples=(sample,), reason=Reason.FILTERED, by="no_reward"))
        kept = tuple(rewarded)
        if kept and self._filters:
            whole = WholeGroup(
                policy_id=self._policy_id,
                prompt=group.prompt,
                samples=kept,
                train_version=train_version,
                run_time=run_time,
            )
            kept = self._sift(whole, drops)
        if len(kept) < self._min_group_size:
            by = [drop.by for drop in drops if drop.by and drop.samples]
            if not found and group.has_reward:
                # Rewarded, and nothing of it was sampled from this policy.
                by = ["no_trajectory"]
            if by:
                self.filtered_in_a_row, self.last_filter = self.filtered_in_a_row + 1, by[-1]
            drops.append(Drop(samples=kept, reason=Reason.GROUP_INCOMPLETE))
            return (), drops
        self.filtered_in_a_row = 0
        rows = [row for sample in kept for row in sample.rows]
        self._faults.call("advantages", None, stamp, rows, self._advantages)
        return kept, drops

    def metrics(self) -> Mapping[str, float]:
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

    def _sift(self, group: WholeGroup, drops: list[Drop]) -> tuple[Sample, ...]:
        """Let every filter drop what it does not keep, until nothing is left."""
        self._group_count += 1
        for name, each in self._filters:
            keeps = self._answers(name, each.keeps, group, default=True)
            kept = tuple(
                sample for sample, is_kept in zip(group.samples, keeps, strict=True) if is_kept
            )
            kept = self._masked(name, each, replace(group, samples=kept)) if kept else kept
            gone = tuple(sample for sample in group.samples if sample not in kept)
            drops.append(Drop(samples=gone, reason=Reason.FILTERED, by=name))
            self._dropped_rollouts[name] += len(gone)
            self._dropped_groups[name] += not kept
            group = replace(group, samples=kept)
            if not kept:
                break
        return group.samples

    def _masked(self, name: str, each: RolloutFilter, group: WholeGroup) -> tuple[Sample, ...]:
        """Mask what a filter wants masked; return nothing when nothing else is left."""
        masks = self._answers(name, each.masks, group, default=False)
        for sample, is_masked in zip(group.samples, masks, strict=True):
            for row in sample.rows if is_masked else ():
                row.is_masked = True
        return () if all(sample.is_masked for sample in group.samples) else group.samples

    def _answers(
        self,
        name: str,
        ask: Callable[[WholeGroup], Sequence[bool]],
        group: WholeGroup,
        *,
        default: bool,
    ) -> Sequence[bool]:
        defaults = [default] * len(group.samples)
        found = self._faults.call(f"filter {name}", defaults, lambda: list(ask(group)))
        if len(found) != len(group.samples):
            what = f"{len(found)} answers for {len(group.samples)} samples"
            self._faults.note(f"filter {name}", what)
            return defaults
        return found


class BatchGuards:
    """The guards of one policy."""

    def __init__(self, specs: Sequence[PlugInSpec], *, max_refusals: int, faults: Faults) -> None:
        self._guards = [(spec.name, make(BatchGuard, spec)) for spec in specs]
        self._max_refusals = max_refusals
        self._faults = faults
        self._refused_in_a_row = 0
        self._refused = Counter[str]()
        self._forced = 0

    def unfit(self, groups: Sequence[FreshGroup]) -> tuple[str, tuple[FreshGroup, ...]] | None:
        """Return who refuses a batch, and the groups at fault; None: it is served."""
        for name, each in self._guards:
            found = self._unfit(name, each, groups)
            faulty = tuple(group for index, group in enumerate(groups) if index in found)
            if not faulty:
                continue
            if self._refused_in_a_row >= self._max_refusals:
                self._forced += 1
                break
            self._refused_in_a_row += 1
            self._refused[name] += 1
            return name, faulty
        self._refused_in_a_row = 0
        return None

    def metrics(self) -> Mapping[str, float]:
        if not self._guards:
            return {}
        found = {"data/guard/forced": float(self._forced)}
        for name, each in self._guards:
            found[f"data/guard/{name}/refused"] = float(self._refused[name])
            found |= self._faults.metrics(f"data/guard/{name}", each)
        return found

    def _unfit(self, name: str, each: BatchGuard, groups: Sequence[FreshGroup]) -> set[int]:
        return self._faults.call(f"guard {name}", set[int](), lambda: set(each.unfit(groups)))
