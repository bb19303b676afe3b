"""`astraflow data`: rows for a run, from where they are."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Write data sets that a recipe can name.")


@app.command("verifiers")
def verifiers(
    environment: Annotated[
        str,
        typer.Argument(metavar="ENVIRONMENT", help="As load_environment of verifiers takes it."),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Lines of JSON.")],
    arguments: Annotated[
        str, typer.Option("--arguments", metavar="JSON", help="Of load_environment.")
    ] = "{}",
    split: Annotated[str, typer.Option("--split", help="train or eval, where there are two.")] = (
        "train"
    ),
    python: Annotated[
        str,
        typer.Option("--python", help="Interpreter that has the environment; unset: this one."),
    ] = "",
) -> None:
    """Write the rows of a verifiers environment, for data.*.path of a recipe."""
    from astraflow.core.errors import AstraflowError, Reason  # noqa: PLC0415
    from astraflow.workflows.agents.verifiers import export_rows  # noqa: PLC0415

    try:
        given = json.loads(arguments)
    except ValueError as error:
        raise AstraflowError(Reason.INVALID_FIELD, f"--arguments is no JSON: {error}") from error
    count = export_rows(out, environment, given, split=split, python=python)
    typer.echo(f"{count} rows in {out}")


@app.command("human-eval")
def human_eval(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Lines of JSON.")],
) -> None:
    """Write HumanEval's problems, from the package human-eval, for the scorer `code`."""
    from astraflow.workflows.data_sets.human_eval import write_human_eval  # noqa: PLC0415

    typer.echo(f"{write_human_eval(out)} rows in {out}")
