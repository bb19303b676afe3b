"""`astraflow run`: a recipe, end to end, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson, Overrides, RecipePath


def run(
    recipe: RecipePath,
    *,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; unset: the recipe's.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that keeps the runs.")] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train what a recipe describes: starts the hub, the rollout nodes and the trainers.

    Shows progress, and ends with a table of what came of it. Ctrl-C once finishes what is
    under way and trains on it; twice stops at once. Exit code 0: the run reached its end;
    1: it failed; 130: it was stopped.
    """
    from rich.console import Console  # noqa: PLC0415

    from astraflow.config.loader import dump_recipe, load_recipe  # noqa: PLC0415

    settings = load_recipe(recipe, overrides or [])
    if name is not None:
        settings = load_recipe(recipe, [*(overrides or []), f"name={name}"])
    if dry_run:
        typer.echo(dump_recipe(settings))
        return
    from astraflow.launch.launcher import run_recipe  # noqa: PLC0415

    summary = run_recipe(settings, runs=runs, console=Console(stderr=as_json))
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(summary.to_json()))
    if summary.failure:
        typer.secho(f"error: the run failed: {summary.failure}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1)
    if summary.was_stopped:
        raise typer.Exit(130)
