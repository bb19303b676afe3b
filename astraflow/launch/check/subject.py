"""A recipe under check, and what is found in it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError
from astraflow.core.tasks import Prompt
from astraflow.engines.tokenizer import FastTokenizer
from astraflow.launch.check.guard import UserLoop
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.data_sets import DataSetReader
from astraflow.workflows.protocol import Scorer, Workflow

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """Rows with the same fields of the same types.

    Attributes:
        prompt: The first of them.
        row_number: Its number among the rows that are kept, from 1.
        count: Rows of this kind.
    """

    prompt: Prompt
    row_number: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenData:
    """A data set that was read.

    Attributes:
        reader: Of it.
        kinds: Of its rows, the most frequent first.
        longest: Indexes of all rows, the longest text first.
        digests: Of what each row says beside its id.
    """

    reader: DataSetReader
    kinds: Sequence[RowKind]
    longest: Sequence[int]
    digests: frozenset[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenModel:
    """What is known of a policy's model without its weights.

    Attributes:
        config: `config.json`, its text part.
        tokenizer: Of it.
        eos_ids: Tokens that end a generation.
        template: Of its chats.
        max_context: Tokens of prompt and completion, as the recipe has them; None: not known.
        parameter_count: 0: not known.
    """

    config: Mapping[str, Any]
    tokenizer: FastTokenizer
    eos_ids: Sequence[int]
    template: ChatTemplate
    max_context: int | None
    parameter_count: int = 0


class Severity(StrEnum):
    """What a finding means for a run."""

    ERROR = "error"
    """It is not started."""
    WARNING = "warning"
    """It is started, and is likely not what was meant."""
    NOTE = "note"
    """Something was not looked at, or matters on another machine only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault.

    Attributes:
        severity: What it means.
        place: Key of the recipe, such as data.train.path; empty: the recipe as a whole.
        what: What is wrong.
        cure: What to do about it; empty when `what` says it.
        detail: Lines of the user's code that raised; empty: none did.
        is_local: Whether another machine may find it otherwise.
    """

    severity: Severity
    place: str
    what: str
    cure: str = ""
    detail: str = ""
    is_local: bool = False

    def elsewhere(self) -> "Finding":
        """Return what it means where the recipe is for another machine than this one."""
        return replace(self, severity=Severity.NOTE) if self.is_local else self


def refusal(place: str, raised: AstraflowError, *, is_local: bool = False) -> Finding:
    """Return an error that has a name as a finding; what follows its first semicolon is the cure.

    Args:
        place: Key of the recipe; taken off the message where it begins with it.
        raised: What a part of astraflow raised.
        is_local: Whether another machine may find it otherwise.
    """
    said = raised.message.removeprefix(place).removeprefix(":").strip()
    what, _, cure = said.partition("; ")
    return Finding(severity=Severity.ERROR, place=place, what=what, cure=cure, is_local=is_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A recipe under check.

    Attributes:
        recipe: Resolved.
        source: Its file.
        runs: Folder that is to keep the run.
        loop: On which code of the user runs.
        workflows: Those that could be made, by name, with their scorers; None: it scores itself.
        data: Data sets that could be read, by name.
        models: Of the policies whose model is here.
        findings: What was found, in the order in which it was.
    """

    recipe: Recipe
    source: Path
    runs: Path
    loop: UserLoop
    workflows: dict[str, tuple[Workflow, Scorer | None]] = field(
        default_factory=dict[str, tuple[Workflow, Scorer | None]]
    )
    data: dict[str, SeenData] = field(default_factory=dict[str, SeenData])
    models: dict[str, SeenModel] = field(default_factory=dict[str, SeenModel])
    findings: list[Finding] = field(default_factory=list[Finding])

    def error(self, place: str, what: str, cure: str = "", *, detail: str = "") -> None:
        """Note what stops a run on any machine."""
        self._find(Severity.ERROR, place, what, cure, detail=detail)

    def error_here(self, place: str, what: str, cure: str = "") -> None:
        """Note what stops a run on this machine."""
        self._find(Severity.ERROR, place, what, cure, is_local=True)

    def warning(self, place: str, what: str, cure: str = "", *, detail: str = "") -> None:
        """Note what is likely not meant."""
        self._find(Severity.WARNING, place, what, cure, detail=detail)

    def warning_here(self, place: str, what: str, cure: str = "") -> None:
        """Note what is likely not meant, on this machine."""
        self._find(Severity.WARNING, place, what, cure, is_local=True)

    def note(self, place: str, what: str, cure: str = "") -> None:
        """Note what was not looked at."""
        self._find(Severity.NOTE, place, what, cure)

    def refused(self, place: str, raised: AstraflowError, *, is_local: bool = False) -> None:
        """Note an error that has a name; see `refusal`."""
        self.findings.append(refusal(place, raised, is_local=is_local))

    def _find(
        self,
        severity: Severity,
        place: str,
        what: str,
        cure: str,
        *,
        detail: str = "",
        is_local: bool = False,
    ) -> None:
        self.findings.append(
            Finding(
                severity=severity,
                place=place,
                what=what,
                cure=cure,
                detail=detail,
                is_local=is_local,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All that was found in one recipe.

    Attributes:
        source: The file.
        recipe: Resolved; None: it cannot be read.
        findings: Errors first, then warnings and notes; in each the order of the recipe.
        wall_s: Seconds that it took.
    """

    source: Path
    recipe: Recipe | None
    findings: Sequence[Finding]
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        order = list(Severity)
        ranked = sorted(self.findings, key=lambda finding: order.index(finding.severity))
        object.__setattr__(self, "findings", tuple(dict.fromkeys(ranked)))

    @property
    def errors(self) -> Sequence[Finding]:
        """What stops a run."""
        return [each for each in self.findings if each.severity is Severity.ERROR]

    def to_json(self) -> Mapping[str, Any]:
        """Return it for machines; keys are not renamed between releases."""
        return {
            "recipe": str(self.source),
            "ok": not self.errors,
            "findings": [asdict(finding) for finding in self.findings],
            "wall_s": round(self.wall_s, 3),
        }


_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show_report(console: "Console", report: CheckReport, *, has_notes: bool = True) -> None:
    """Print a report: findings by their place, what is wrong, then what to do.

    Args:
        console: Where to.
        report: Of one recipe.
        has_notes: Whether notes are shown.
    """
    from rich.table import Table  # noqa: PLC0415 - commands load it when they print
    from rich.text import Text  # noqa: PLC0415

    shown = [each for each in report.findings if has_notes or each.severity is not Severity.NOTE]
    for place, group in groupby(shown, key=lambda finding: finding.place):
        console.print(Text(place or str(report.source), style="bold"))
        table = Table.grid(padding=(0, 1), pad_edge=True)
        table.add_column(width=9)
        table.add_column(ratio=1)
        for finding in group:
            style = _STYLES[finding.severity]
            table.add_row(Text(f" {finding.severity}", style=style), Text(finding.what))
            cure = [f"→ {finding.cure}"] if finding.cure else []
            for text in (*finding.detail.splitlines(), *cure):
                table.add_row("", Text(text, style="dim"))
        console.print(table)
    counts = {
        severity: sum(each.severity is severity for each in report.findings)
        for severity in Severity
    }
    said = ", ".join(
        f"{count} {severity}{'s' if count != 1 else ''}"
        for severity, count in counts.items()
        if count
    )
    style = "bold red" if report.errors else "green"
    verdict = "refused" if report.errors else "can be run"
    tail = f": {said}" if said else ""
    parts = (f"{report.source} {verdict}", style), f"{tail}  ", (f"{report.wall_s:.1f} s", "dim")
    console.print(Text.assemble(*parts))
