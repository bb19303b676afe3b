"""`astraflow dataflow`: the hub."""

from typing import Annotated

import typer

from astraflow.cli.options import (
    CaFile,
    CertificateFile,
    KeyFile,
    Overrides,
    RecipePath,
    RunFolder,
)

app = typer.Typer(
    no_args_is_help=True, help="The hub: prompts, tasks, rollouts, batches, versions."
)


@app.callback()
def _group() -> None: ...


@app.command()
def serve(
    recipe: RecipePath,
    *,
    overrides: Overrides = None,
    listen: Annotated[
        str | None, typer.Option(help="host:port to serve on; unset: the recipe's hub.listen.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            help="How others dial it: auto, fqdn, or a host or IP; unset: as listened on."
        ),
    ] = None,
    run_dir: RunFolder = None,
    tls_certificate: CertificateFile = None,
    tls_key: KeyFile = None,
    tls_ca: CaFile = None,
) -> None:
    """Serve the hub of a recipe until the run is over.

    Members join with ASTRAFLOW_JOIN_TOKEN, operators look with ASTRAFLOW_OPERATOR_TOKEN; a
    token that is not set is made, and kept with the address in hub.json in the run's folder.
    SIGTERM or Ctrl-C once drains the run, twice cancels it.
    """
    from astraflow.cli.roles import serve_hub  # noqa: PLC0415

    raise typer.Exit(
        serve_hub(
            recipe,
            overrides=[
                *(overrides or []),
                *given("hub.listen", listen),
                *given("hub.advertise", advertise),
                *given("hub.tls.certificate", tls_certificate),
                *given("hub.tls.key", tls_key),
                *given("hub.tls.ca", tls_ca),
            ],
            run_dir=run_dir,
        )
    )


def given(key: str, value: object) -> list[str]:
    """Return an override of the recipe for an option that was given."""
    return [] if value is None else [f"{key}={value}"]
