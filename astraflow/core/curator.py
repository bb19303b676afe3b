"""The curator: the selectors of a run, and how they came to know what they know.

What a selector learned from a group that is rolled back counts as not learned: selectors as they
were some lessons ago are kept, and told the others again.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from astraflow.core.algorithms.faults import Faults
from astraflow.core.algorithms.finding import selector
from astraflow.core.algorithms.plug_in import Dice, PlugInSpec
from astraflow.core.algorithms.points import GroupOutcome, PromptSelector
from astraflow.core.tasks import Prompt

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
    """Asks all selectors of a recipe, and tells them what happened."""

    def __init__(self, specs: Sequence[PlugInSpec], *, seed: int, faults: Faults) -> None:
        """Begin without a lesson.

        Raises:
            AstraflowError: CODE_UNKNOWN, INVALID_FIELD as `finding.make`.
        """
        self._selectors: _Named = [(spec.name, selector(spec)) for spec in specs]
        self._before: _Named = [(spec.name, selector(spec)) for spec in specs]
        self._lessons = deque[_Lesson]()
        self._dice = Dice(seed=seed, salt="select")
        self._faults = faults

    @property
    def is_there(self) -> bool:
        """Whether the recipe names any selector."""
        return bool(self._selectors)

    def admits(self, prompt: Prompt) -> bool:
        """Whether every selector admits a prompt."""
        return all(
            self._faults.call(f"selector {name}", True, each.admits, prompt, self._dice)
            for name, each in self._selectors
        )

    def note(self, number: int, outcome: GroupOutcome) -> None:
        """Learn from a group, by its number."""
        self._learn(_Lesson(number=number, outcome=outcome))

    def begin_version(self, version: int) -> None:
        """Learn of a version."""
        self._learn(_Lesson(version=version))

    def end_warm_up(self) -> None:
        """Learn that the warm-up is over."""
        self._learn(_Lesson())

    def forget(self, numbers: Collection[int]) -> None:
        """Let what groups taught count as not learned."""
        gone = frozenset(numbers)
        if not any(lesson.number in gone for lesson in self._lessons):
            return
        self._lessons = deque(each for each in self._lessons if each.number not in gone)
        self._selectors = deepcopy(self._before)
        for lesson in self._lessons:
            self._teach(self._selectors, lesson)

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of all selectors for the log."""
        found: dict[str, float] = {}
        for name, each in self._selectors:
            found |= self._faults.metrics(f"data/select/{name}", each)
        return found

    def _learn(self, lesson: _Lesson) -> None:
        if not self._selectors:
            return
        self._teach(self._selectors, lesson)
        self._lessons.append(_without_blobs(lesson))
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


def _without_blobs(lesson: _Lesson) -> _Lesson:
    """Return a lesson that is small enough to be kept."""
    outcome = lesson.outcome
    if outcome is None or not outcome.prompt.blobs:
        return lesson
    return replace(lesson, outcome=replace(outcome, prompt=replace(outcome.prompt, blobs={})))
