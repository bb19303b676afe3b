"""`astraflow raas`: rollout nodes."""

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
    RunPath,
    directories,
)

app = typer.Typer(no_args_is_help=True, help="Rollout as a service: nodes that run workflows.")


@app.callback()
def _group() -> None: ...


@app.command()
def join(
    recipe: RecipePath,
    hub: HubAddress,
    token: JoinToken,
    *,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Unique in the pool; unset: from host and process.")
    ] = None,
    region: Annotated[str, typer.Option(help="Where it stands, such as eu-west.")] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY=DIR", help="Model directory of a policy; unset: the recipe's."
        ),
    ] = None,
    tls_certificate: CertificateFile = None,
    tls_key: KeyFile = None,
    tls_ca: CaFile = None,
) -> None:
    """Join the pool of a run from any machine that can dial its hub.

    The node dials out. It opens a port only for its metrics (metrics.listen) and where it relays
    weights to others (raas.relay): on the hub's own host, or where the recipe names an address.

    It pulls the newest weights, takes tasks, returns rollouts, and leaves when the run is over.
    SIGTERM lets it finish what it holds and leave; nothing is lost when it is killed.
    """
    from astraflow.cli.roles import join_pool, tls_of  # noqa: PLC0415

    raise typer.Exit(
        join_pool(
            recipe,
            overrides=overrides or [],
            hub=hub,
            token=token,
            name=name,
            region=region,
            models=directories(model),
            tls=tls_of(tls_certificate, tls_key, tls_ca),
        )
    )


@app.command()
def drain(
    run: RunPath,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name or id of a member.", show_default=False)
    ],
    *,
    grace_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds to leave; unset: no limit.")
    ] = None,
) -> None:
    """Let a node finish what it holds, hand back the rest and leave; nothing is lost."""
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.drain import drain_member  # noqa: PLC0415

    typer.echo(asyncio.run(drain_member(RunDir(run), name, grace_s=grace_s)))
