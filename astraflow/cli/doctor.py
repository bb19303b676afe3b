"""`astraflow doctor`: what works here."""

import typer

from astraflow.cli.options import AsJson


def doctor(*, as_json: AsJson = False) -> None:
    """Check versions, machine, ports, devices, lanes and engines, and say what to do.

    Exit code 1 when something that a run needs does not work.
    """
    from astraflow.launch.doctor import examine  # noqa: PLC0415

    checks = list(examine())
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps([check.to_json() for check in checks], indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table("area", "what", "", "found", "to do")
        marks = {True: "[green]works[/]", False: "[red]broken[/]", None: "[dim]not here[/]"}
        for check in checks:
            table.add_row(check.area, check.name, marks[check.works], check.found, check.advice)
        Console().print(table)
    if any(check.works is False for check in checks):
        raise typer.Exit(1)
