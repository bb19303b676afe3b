"""Guarding: batches that are refused, so many times in a row at most."""

from collections import Counter
from collections.abc import Mapping, Sequence

from astraflow.core.algorithms.faults import Faults
from astraflow.core.algorithms.finding import batch_guard
from astraflow.core.algorithms.plug_in import PlugInSpec
from astraflow.core.algorithms.points import BatchGuard
from astraflow.core.samples import FreshGroup


class BatchGuards:
    """The guards of one policy."""

    def __init__(self, specs: Sequence[PlugInSpec], *, max_refusals: int, faults: Faults) -> None:
        """Make them.

        Raises:
            AstraflowError: CODE_UNKNOWN, INVALID_FIELD as `finding.make`.
        """
        self._guards = [(spec.name, batch_guard(spec)) for spec in specs]
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
        """Return numbers for the log."""
        if not self._guards:
            return {}
        found = {"data/guard/forced": float(self._forced)}
        for name, each in self._guards:
            found[f"data/guard/{name}/refused"] = float(self._refused[name])
            found |= self._faults.metrics(f"data/guard/{name}", each)
        return found

    def _unfit(self, name: str, each: BatchGuard, groups: Sequence[FreshGroup]) -> set[int]:
        return self._faults.call(f"guard {name}", set[int](), lambda: set(each.unfit(groups)))
