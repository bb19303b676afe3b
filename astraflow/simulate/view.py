"""A report as a table, for people."""

from rich.console import Console
from rich.table import Table

from astraflow.simulate.report import Report


def show(report: Report, oracle: Report | None) -> None:
    """Print what came of a simulation, beside its oracle if there is one."""
    console = Console()
    table = Table("", "simulated", *(["oracle"] if oracle is not None else []))
    columns = [_rows(each) for each in (report, oracle) if each is not None]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    for step in report.scaling:
        console.print(
            f"{step.seconds / 3600:7.2f} h  +{step.started} -{step.drained} "
            f"to {step.target}: {step.message}"
        )
    for law, count in report.broken_laws.items():
        console.print(f"[red]broken {count} times:[/] {law}")


def _rows(report: Report) -> dict[str, str]:
    stale = sum(drop.count for drop in report.books.drops if drop.reason == "STALE")
    return {
        "hours": f"{report.hours:g}",
        "nodes": f"{report.node_count:.1f}",
        "node-hours": f"{report.node_hours:,.1f}",
        "optimizer steps": f"{report.step_count:,}",
        "trainer waited": f"{report.wait_fraction:.1%}",
        "rollouts trained on": f"{report.books.trained_count:,}",
        "of these per second": f"{report.rollouts_per_s:.2f}",
        "dropped as stale": f"{stale:,}",
        "issued again": f"{report.books.reissued_count:,}",
        "staleness": ", ".join(f"{age}: {count:,}" for age, count in report.staleness.items()),
        "crashed, left": f"{report.crash_count:,}, {report.leave_count:,}",
        "laws": "hold" if not report.broken_laws else "BROKEN",
        "events": f"{report.event_count:,} in {report.wall_s:.1f} s",
    }
