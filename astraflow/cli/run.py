"""`astraflow run`: a recipe, end to end, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.check import REFUSED
from astraflow.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from astraflow.config.recipe import Recipe
    from astraflow.launch.summary import RunSummary

OptionalRecipe = Annotated[
    Path | None,
    typer.Argument(metavar="RECIPE", help="Recipe, such as recipes/sort.yaml.", show_default=False),
]


def run(
    recipe: OptionalRecipe = None,
    *,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; unset: the recipe's.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that keeps the runs.")] = Path("runs"),
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved recipe and what is wrong with it."),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="Start what [bold]astraflow check[/] refuses, where it is wrong."
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Folder of a run whose processes died, such as [bold]runs/sort[/]: go on with it "
            "from its journal and its last checkpoints.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --resume: go back to this checkpoint of [bold]astraflow save[/].",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train what a recipe describes: starts the hub, the rollout nodes and the trainers.

    Looks for faults first, as [bold]astraflow check[/] does. Shows progress, and ends with a
    table of what came of it. Ctrl-C once finishes what is under way and trains on it; twice
    stops at once. Exit code 0: the run reached its end; 1: it failed; 2: the recipe was
    refused, and nothing was started; 130: it was stopped.
    """
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=as_json)
    if resume is not None:
        _must_stand_alone(recipe=recipe, overrides=overrides, name=name, dry_run=dry_run)
        from astraflow.launch.runs import resume_run  # noqa: PLC0415

        summary = resume_run(resume, console=console, checkpoint_id=checkpoint or "")
        _end(summary, as_json=as_json)
        return
    if checkpoint is not None:
        raise typer.BadParameter("only a run that is resumed goes back", param_hint="--checkpoint")
    if recipe is None:
        raise typer.BadParameter("give a recipe, or --resume RUN", param_hint="RECIPE")
    named = [f"name={name}"] if name is not None else []
    settings = _checked(
        recipe, [*(overrides or []), *named], runs, is_dry=dry_run, is_bound=not no_check
    )
    if dry_run:
        return
    from astraflow.launch.runs import run_recipe  # noqa: PLC0415

    _end(run_recipe(settings, runs=runs, console=console), as_json=as_json)


def _checked(
    path: Path, overrides: list[str], runs: Path, *, is_dry: bool, is_bound: bool
) -> "Recipe":
    """Return a recipe that can be run; else say why not, and exit.

    Args:
        path: Of the recipe.
        overrides: Each `a.b=value`.
        runs: Folder that is to keep the run.
        is_dry: Print it, with every default.
        is_bound: Whether errors of the check end the command.
    """
    from astraflow.launch.check import check_recipe  # noqa: PLC0415
    from astraflow.launch.check.report import Severity, show_report  # noqa: PLC0415

    report = check_recipe(path, overrides, runs=runs)
    if is_dry and report.recipe is not None:
        from astraflow.config.loader import dump_recipe  # noqa: PLC0415

        typer.echo(dump_recipe(report.recipe))
    if any(finding.severity is not Severity.NOTE for finding in report.findings):
        from rich.console import Console  # noqa: PLC0415

        show_report(Console(stderr=True), report, has_notes=is_dry)
    if report.recipe is None or (report.errors and is_bound):
        raise typer.Exit(REFUSED)
    return report.recipe


def _must_stand_alone(**others: object) -> None:
    """Refuse what would make another run of the one to go on with."""
    given = [key for key, value in others.items() if value]
    if given:
        raise typer.BadParameter(
            f"the run has its own recipe; leave out {', '.join(given)}", param_hint="--resume"
        )


def _end(summary: "RunSummary", *, as_json: bool) -> None:
    """Print the summary for machines, and exit as the run did."""
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(summary.to_json()))
    if summary.failure:
        typer.secho(f"error: the run failed: {summary.failure}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1)
    if summary.was_stopped:
        raise typer.Exit(130)
