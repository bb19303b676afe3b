"""`astraflow trainer`: one process per policy."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import (
    CaFile,
    CertificateFile,
    HubAddress,
    JoinToken,
    KeyFile,
    Overrides,
    RecipePath,
    RunFolder,
)

app = typer.Typer(no_args_is_help=True, help="Trainers: one process per policy.")

PolicyName = Annotated[str, typer.Option("--policy", help="A policy of the recipe.")]
ModelFolder = Annotated[
    Path | None, typer.Option("--model", help="Model directory; unset: the recipe's.")
]
WeightAddress = Annotated[
    str, typer.Option("--listen", help="host:port on which it serves its weights.")
]
AdvertisedHost = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        help="How others dial that: auto, fqdn, or a host or IP; unset: as listened on.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint in --run-dir that the run knows."
    ),
]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint", metavar="NAME", help="With --resume: go on from this one, and no other."
    ),
]
OwnEngine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="MODULE:FACTORY",
        help="Returns what steps the model, in place of the recipe's engine; looked for here and "
        "on PYTHONPATH.",
    ),
]


@app.callback()
def _group() -> None: ...


@app.command("run")
def run_trainer(
    recipe: RecipePath,
    policy: PolicyName,
    hub: HubAddress,
    token: JoinToken,
    *,
    overrides: Overrides = None,
    engine: OwnEngine = None,
    model: ModelFolder = None,
    run_dir: RunFolder = None,
    listen: WeightAddress = "127.0.0.1:0",
    advertise: AdvertisedHost = None,
    resume: Resume = False,
    checkpoint: Checkpoint = "",
    tls_certificate: CertificateFile = None,
    tls_key: KeyFile = None,
    tls_ca: CaFile = None,
) -> None:
    """Train one policy: takes batches, publishes every version, writes checkpoints."""
    from astraflow.cli.roles import tls_of, train  # noqa: PLC0415

    raise typer.Exit(
        train(
            recipe,
            overrides=overrides or [],
            policy=policy,
            hub=hub,
            token=token,
            engine=engine,
            model=model,
            run_dir=run_dir,
            listen=listen,
            advertise=advertise,
            resume=resume,
            checkpoint_id=checkpoint,
            tls=tls_of(tls_certificate, tls_key, tls_ca),
        )
    )


@app.command("warm-up")
def warm_up(
    recipe: RecipePath,
    policy: PolicyName,
    *,
    overrides: Overrides = None,
    write_path: Annotated[
        Path | None, typer.Option(help="Write the directory's path as JSON into this file.")
    ] = None,
) -> None:
    """Get or make the model that a policy starts from, or find it in the cache.

    Prints the progress, and in the end the directory.
    """
    from astraflow.cli.roles import make_warm_up  # noqa: PLC0415

    path = make_warm_up(recipe, overrides=overrides or [], policy=policy)
    if write_path is not None:
        import json  # noqa: PLC0415

        write_path.write_text(json.dumps({"path": str(path)}))
    typer.echo(path)


@app.command("merge")
def merge(
    adapters: Annotated[Path, typer.Argument(metavar="ADAPTERS", help="A checkpoint of adapters.")],
    target: Annotated[Path, typer.Option("--out", help="Directory to write.")],
    base: Annotated[
        Path | None,
        typer.Option("--model", help="The model of the adapters; unset: where they say it lies."),
    ] = None,
) -> None:
    """Write adapters and their model as one Hugging Face directory."""
    from astraflow.config.lora import base_of  # noqa: PLC0415
    from astraflow.trainers.model_files import write_merged  # noqa: PLC0415 - loads torch

    write_merged(base or base_of(adapters), adapters, target)
    typer.echo(target)
