"""`astraflow init | ls | show | compare | logs | stop`: runs begun, live or over."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath, run_async
from astraflow.config.run_dir import RunDir

RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)
]


def init(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Such as math or sort; unset: lists them.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Is made; unset: the recipe's name.", show_default=False),
    ] = None,
    *,
    machine: Annotated[
        str, typer.Option("--for", help="Whose settings: cpu, gpu-8 or gpu-2x8.")
    ] = "cpu",
) -> None:
    """Begin with a recipe that comes with astraflow, in a folder of your own."""
    from astraflow.launch.init import init_recipe, packaged_recipes  # noqa: PLC0415

    if recipe is None:
        for name, what in packaged_recipes().items():
            typer.echo(f"{name:20} {what}")
        return
    target = folder or Path(recipe)
    init_recipe(recipe, target, machine=machine)
    typer.echo(f"{target} is there: cd {quote(str(target))} && astraflow run recipe.yaml")


def ls(
    runs: Annotated[Path, typer.Argument(help="Folder that keeps the runs.")] = Path("runs"),
    *,
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder, live or over: state, steps, reward, when it last changed."""
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.runs import list_runs, show_runs  # noqa: PLC0415

    rows = list_runs(runs)
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        show_runs(Console(), rows)


def show(run: RunPath, *, as_json: AsJson = False) -> None:
    """Show what came of a run so far, as at its end."""
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.runs import summary_of  # noqa: PLC0415
    from astraflow.launch.summary import show_summary  # noqa: PLC0415

    summary = summary_of(RunDir(run))
    if as_json:
        typer.echo(json.dumps(summary.to_json()))
    else:
        show_summary(Console(), summary, RunDir(run))


def compare(runs: RunPaths, *, as_json: AsJson = False) -> None:
    """Compare runs: what came of each, and the keys in which their recipes differ."""
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.runs import differences, row_of, show_differences, show_runs  # noqa: PLC0415

    folders = [RunDir(path) for path in runs]
    rows = [row_of(each) for each in folders]
    changed = differences(folders)
    if as_json:
        typer.echo(json.dumps({"runs": rows, "differences": changed}))
        return
    show_runs(Console(), rows)
    show_differences(Console(), folders, changed)


def logs(
    run: RunPath,
    role: Annotated[
        str | None,
        typer.Argument(
            help="Such as hub, trainer-solver or raas-0; unset: all.", show_default=False
        ),
    ] = None,
    *,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on while the run is live.")
    ] = False,
) -> None:
    """Print what the roles of a run have logged."""
    from astraflow.launch.runs import log_lines  # noqa: PLC0415

    for line in log_lines(RunDir(run), role, count=count, is_followed=follow):
        typer.echo(line)


def stop(
    run: RunPath,
    *,
    now: Annotated[
        bool, typer.Option("--now", help="Drop what is under way instead of training on it.")
    ] = False,
) -> None:
    """Have a live run finish what is under way, train on it and end; wait until it has.

    [bold]astraflow run --resume RUN[/] goes on with it.
    """
    from astraflow.launch.runs import stop_run  # noqa: PLC0415

    run_async(stop_run(RunDir(run), is_now=now))
    typer.echo(f"{run} is over; `astraflow run --resume {quote(str(run))}` goes on with it")
