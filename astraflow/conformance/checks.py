"""Checks: what the contract asks for, where it says so, and what was seen."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise of a peer.

    Attributes:
        name: Such as batches.acked; stable.
        expected: What a peer does, in a sentence.
        source: Where the contract says so: a message, call or page.
        verdict: Whether it did.
        seen: What was seen instead; empty when it passed.
    """

    name: str
    expected: str
    source: str
    verdict: Verdict = Verdict.NOT_REACHED
    seen: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "expected": self.expected,
            "source": self.source,
            "seen": self.seen,
        }


class Broken(Exception):  # noqa: N818 - it is a finding, not a defect of this program
    """A peer did not do what a check expects; the text says what was seen."""


class CheckList:
    """All checks of one kind of peer, and what came of each.

    What was not judged is NOT_REACHED: an earlier check failed.
    """

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks = {check.name: check for check in checks}

    def passed(self, name: str) -> None:
        """Note that a peer keeps a promise; a check that failed stays failed."""
        if self._checks[name].verdict is not Verdict.FAILED:
            self._judge(name, Verdict.PASSED)

    def failed(self, name: str, seen: str) -> None:
        """Note that a peer broke a promise; the first time counts."""
        if self._checks[name].verdict is not Verdict.FAILED:
            self._judge(name, Verdict.FAILED, seen)

    def _judge(self, name: str, verdict: Verdict, seen: str = "") -> None:
        self._checks[name] = replace(self._checks[name], verdict=verdict, seen=seen)

    @property
    def all(self) -> tuple[Check, ...]:
        """In the order of the list."""
        return tuple(self._checks.values())

    @property
    def are_kept(self) -> bool:
        """Whether all of them passed."""
        return all(check.verdict is Verdict.PASSED for check in self.all)
