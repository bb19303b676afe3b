"""Arguments and options that several commands share."""

from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from astraflow.core.errors import AstraflowError, Reason

ResultT = TypeVar("ResultT")

RecipePath = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="Recipe, such as recipes/sort.yaml.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the recipe, such as "
        "[bold]policies.solver.trainer.step_count=20[/]. Can be given many times.",
    ),
]
RunPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the run, such as runs/sort.", show_default=False),
]
HubAddress = Annotated[
    str,
    typer.Option(
        "--hub",
        help="host:port of the hub; of several, tried in turn, with commas.",
        envvar="ASTRAFLOW_HUB",
    ),
]
JoinToken = Annotated[
    str,
    typer.Option(
        "--token",
        help="Join token of the run; the hub's operator has it.",
        envvar="ASTRAFLOW_JOIN_TOKEN",
        show_envvar=True,
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder of the run; unset: runs/NAME, of the recipe."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
CaFile = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="PEM file of the authority that signed the peer's certificate."),
]
CertificateFile = Annotated[
    Path | None, typer.Option("--tls-certificate", help="PEM file of this process's certificate.")
]
KeyFile = Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its private key.")]


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run to the end what is asynchronous; what does that is loaded only then."""
    import asyncio  # noqa: PLC0415

    return asyncio.run(work)


def given(options: Mapping[str, object]) -> list[str]:
    """Return overrides of a recipe's keys for the options that were given."""
    return [f"{key}={value}" for key, value in options.items() if value is not None]


def directories(values: list[str] | None) -> dict[str, Path]:
    """Split the POLICY=DIR arguments of --model.

    Raises:
        AstraflowError: INVALID_FIELD for one without an equals sign.
    """
    return {policy: Path(path) for policy, path in pairs(values or [], "--model").items()}


def pairs(values: list[str], option: str) -> dict[str, str]:
    """Split NAME=VALUE arguments.

    Raises:
        AstraflowError: INVALID_FIELD for one without an equals sign.
    """
    for value in values:
        if "=" not in value:
            raise AstraflowError(Reason.INVALID_FIELD, f"{option} {value}: give NAME=VALUE")
    return dict(value.split("=", 1) for value in values)
