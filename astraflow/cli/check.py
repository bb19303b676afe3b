"""`astraflow check`: all faults of a recipe at once, before anything is started."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson, Overrides, RecipePath

REFUSED = 2
"""Exit code of a recipe that is refused."""


def check(
    recipe: RecipePath,
    *,
    overrides: Overrides = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="The recipe is for another machine: what this one lacks is a note.",
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder that is to keep the run.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look for faults in a recipe, and say what to do about each.

    Reads data sets, tokenizers and templates, imports the code that the recipe names, and runs
    workflows and scorers on some rows with answers that are right and wrong. Starts no process,
    downloads nothing, writes nothing. Exit code 2: it has errors, and a run would be refused.
    """
    from astraflow.launch.check import check_recipe  # noqa: PLC0415

    report = check_recipe(recipe, overrides or [], runs=runs, is_elsewhere=elsewhere)
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415

        from astraflow.launch.check.report import show_report  # noqa: PLC0415

        show_report(Console(), report)
    if report.errors:
        raise typer.Exit(REFUSED)
