"""Findings, for people and for machines."""

import json
from typing import Final

from rich.console import Console
from rich.markup import escape

from astraflow.conformance.checks import Check, CheckList, Verdict

_MARKS: Final = {
    Verdict.PASSED: "[green]passed[/]",
    Verdict.FAILED: "[red]failed[/]",
    Verdict.NOT_REACHED: "[dim]not reached[/]",
}


def show(checks: CheckList, *, as_json: bool) -> None:
    """Write all checks to standard output; what failed with its explanation."""
    if as_json:
        Console(soft_wrap=True, highlight=False).print_json(to_json(checks))
        return
    console = Console(soft_wrap=True, highlight=False)
    for check in checks.all:
        console.print(f"{_MARKS[check.verdict]}  {check.name}")
        if check.verdict is Verdict.FAILED:
            console.print(_explanation(check))


def to_json(checks: CheckList) -> str:
    """Return the findings as one JSON object."""
    found = [check.to_json() for check in checks.all]
    return json.dumps({"passed": checks.are_kept, "checks": found})


def _explanation(check: Check) -> str:
    lines = {
        "expected": f"a peer {check.expected}",
        "seen": check.seen,
        "contract": check.source,
    }
    return "\n".join(f"    [bold]{name}[/]: {escape(line)}" for name, line in lines.items())
