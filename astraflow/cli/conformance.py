"""`astraflow conformance`: whether a peer in any language keeps the contract."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson

app = typer.Typer(
    no_args_is_help=True,
    help="Check a trainer, a RaaS or a source of weights, in any language, against the contract.",
)

Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where the member dials the run.")
]
Command = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Starts the member; {hub}, {token} and {policy} are replaced. Unset: it is started "
        "by you, with what is printed.",
    ),
]
Patience = Annotated[
    float, typer.Option("--patience", min=0.1, help="Seconds to wait for any one thing.")
]


@app.command("trainer")
def trainer(
    *,
    listen: Listen = "127.0.0.1:0",
    command: Command = None,
    patience_s: Patience = 30.0,
    as_json: AsJson = False,
) -> None:
    """Serve a run to a trainer of the policy solver, and check what it does.

    Batches have two groups. Connections are cut, answers lost and a session ended on the way; at
    the end it is drained. Exit code 1 when a check failed.
    """
    from astraflow.conformance.commands import TRAINER, CheckTerms, check_member  # noqa: PLC0415

    terms = CheckTerms(listen=listen, command=command, patience_s=patience_s)
    if not check_member(TRAINER, terms, as_json=as_json):
        raise typer.Exit(1)


@app.command("raas")
def raas(
    *,
    listen: Listen = "127.0.0.1:0",
    command: Command = None,
    patience_s: Patience = 30.0,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Directory whose *.safetensors the RaaS serves; the run publishes them as its "
            "versions. Unset: one tensor of 100 numbers, for a RaaS that takes any.",
        ),
    ] = None,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", help="Text that the model of the RaaS knows; can be given many times."
        ),
    ] = list("0123456789"),  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Serve a run to a RaaS with the policy solver, and check what it does.

    The workflow is single_turn, the scorer exact. The first chunk of weights is corrupt; a task is
    cancelled, streams are cut, acks come late. Exit code 1 when a check failed.
    """
    from astraflow.conformance.commands import RAAS, CheckTerms, check_member  # noqa: PLC0415

    terms = CheckTerms(
        listen=listen, command=command, patience_s=patience_s, model=model, prompts=prompt
    )
    if not check_member(RAAS, terms, as_json=as_json):
        raise typer.Exit(1)


@app.command("weights")
def weights(
    *,
    target: Annotated[
        str, typer.Option("--target", metavar="HOST:PORT", help="The TransferService.")
    ],
    version: Annotated[
        Path,
        typer.Option("--version-info", help="What was published: a VersionInfo message as JSON."),
    ],
    token: Annotated[
        str,
        typer.Option(
            "--transfer-token",
            envvar="ASTRAFLOW_TRANSFER_TOKEN",
            help="Session.transfer_token, in hexadecimal.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Pull a version from a TransferService, and check what it sends.

    Exit code 1 when a check failed. `astraflow conformance trainer` makes these checks too.
    """
    from astraflow.conformance.commands import check_transfer_service  # noqa: PLC0415

    if not check_transfer_service(target, token=token, version=version, as_json=as_json):
        raise typer.Exit(1)


@app.command("engine")
def engine(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="Returns a new train engine with each call; looked for here and on PYTHONPATH.",
        ),
    ],
    *,
    vocabulary_size: Annotated[
        int, typer.Option("--vocabulary-size", min=2, help="Tokens that its model knows.")
    ],
    as_json: AsJson = False,
) -> None:
    """Let a train engine of your own make steps and checkpoints, and check what it does.

    Exit code 1 when a check failed.
    """
    from astraflow.conformance.engine import check_train_engine  # noqa: PLC0415

    if not check_train_engine(factory, vocabulary_size=vocabulary_size, as_json=as_json):
        raise typer.Exit(1)
