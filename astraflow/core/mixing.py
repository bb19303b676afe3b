"""Mixing: which of several data sets the next prompt comes from.

The shares of the data sets are those of their weights at any time, not on average: the next prompt
comes from the data set that is furthest behind its share.

Example:
    Weights easy 3, hard 1. Prompts come from easy, easy, hard, easy, and so on.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPhaseSettings:
    """How data sets are mixed from a version on.

    Attributes:
        weights: By data set; those that are left out give nothing.
        from_version: First version of the workflow's first policy that it is for.
    """

    weights: Mapping[str, float]
    from_version: int = 0


class Mixing:
    """Chooses data sets by the weights of the phase that a version is in."""

    def __init__(self, phases: Collection[MixPhaseSettings]) -> None:
        self._phases = sorted(phases, key=lambda phase: phase.from_version)
        self._phase = self._phases[0]
        self._counts = Counter[str]()

    def begin_version(self, version: int) -> None:
        """Count anew where the next phase begins."""
        phase = [each for each in self._phases if each.from_version <= max(0, version)][-1]
        if phase is not self._phase:
            self._phase = phase
            self._counts.clear()

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
        total = 1 + sum(self._counts[name] for name in shares)
        return max(shares, key=lambda name: shares[name] * total - self._counts[name])

    def count(self, name: str) -> None:
        """Note that a prompt of a data set was issued."""
        self._counts[name] += 1

    def metrics(self) -> dict[str, float]:
        """Return the share of each data set in this phase, by its name."""
        total = sum(self._counts.values())
        return {f"data/mix/{name}": count / total for name, count in self._counts.items()}
