"""Checks: what the contract asks for, where it says so, what was seen; for people and machines."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

from rich.console import Console
from rich.markup import escape


class CheckVerdict(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractCheck:
    """One promise of a peer.

    Attributes:
        name: Such as batches.acked; stable.
        expected: What a peer does, in a sentence.
        source: Where the contract says so: a message, call or page.
        seen: What was seen instead; empty when it passed.
    """

    name: str
    expected: str
    source: str
    verdict: CheckVerdict = CheckVerdict.NOT_REACHED
    seen: str = ""


class Broken(Exception):  # noqa: N818 - it is a finding, not a defect of this program
    """A peer did not do what a check expects; the text says what was seen."""


class CheckList:
    """All checks of one kind of peer, and what came of each.

    What was not judged is NOT_REACHED: an earlier check failed.
    """

    def __init__(self, checks: Iterable[ContractCheck]) -> None:
        self._checks = {check.name: check for check in checks}

    def passed(self, name: str) -> None:
        """Note that a peer keeps a promise; a check that failed stays failed."""
        if self._checks[name].verdict is not CheckVerdict.FAILED:
            self._judge(name, CheckVerdict.PASSED)

    def failed(self, name: str, seen: str) -> None:
        """Note that a peer broke a promise; the first time counts."""
        if self._checks[name].verdict is not CheckVerdict.FAILED:
            self._judge(name, CheckVerdict.FAILED, seen)

    def _judge(self, name: str, verdict: CheckVerdict, seen: str = "") -> None:
        self._checks[name] = replace(self._checks[name], verdict=verdict, seen=seen)

    @property
    def all(self) -> tuple[ContractCheck, ...]:
        return tuple(self._checks.values())

    @property
    def are_kept(self) -> bool:
        """Whether all of them passed."""
        return all(check.verdict is CheckVerdict.PASSED for check in self.all)


_MARKS: Final = {
    CheckVerdict.PASSED: "[green]passed[/]",
    CheckVerdict.FAILED: "[red]failed[/]",
    CheckVerdict.NOT_REACHED: "[dim]not reached[/]",
}


def show(checks: CheckList, *, as_json: bool) -> None:
    """Write all checks to standard output; what failed with its explanation."""
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        console.print_json(to_json(checks))
        return
    for check in checks.all:
        console.print(f"{_MARKS[check.verdict]}  {check.name}")
        if check.verdict is CheckVerdict.FAILED:
            lines = {
                "expected": f"a peer {check.expected}",
                "seen": check.seen,
                "contract": check.source,
            }
            for name, line in lines.items():
                console.print(f"    [bold]{name}[/]: {escape(line)}")


def to_json(checks: CheckList) -> str:
    """Return the findings as one JSON object."""
    return json.dumps({"passed": checks.are_kept, "checks": [asdict(each) for each in checks.all]})
