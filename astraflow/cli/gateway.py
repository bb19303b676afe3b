"""`astraflow gateway`: the HTTP endpoints of existing peers, on a run."""

from typing import Annotated

import typer

from astraflow.cli.dataflow import given
from astraflow.cli.options import (
    AsJson,
    CaFile,
    CertificateFile,
    HubAddress,
    JoinToken,
    KeyFile,
    Overrides,
    RecipePath,
    pairs,
)

app = typer.Typer(no_args_is_help=True, help="HTTP for peers that exist already.")


@app.callback()
def _group() -> None: ...


@app.command()
def serve(
    recipe: RecipePath,
    hub: HubAddress,
    token: JoinToken,
    *,
    overrides: Overrides = None,
    operator_token: Annotated[
        str | None,
        typer.Option(
            help="Operator token of the run; unset: no /status, /raas_pool, /shutdown.",
            envvar="ASTRAFLOW_OPERATOR_TOKEN",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="To listen on; unset: the recipe's http.host.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="To listen on; unset: the recipe's http.port.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY=DIR", help="First weights of a policy; unset: the recipe's."),
    ] = None,
    legacy_pickle: Annotated[
        bool, typer.Option("--legacy-pickle", help="Read pickled requests; nothing in them runs.")
    ] = False,
    as_json: AsJson = False,
    tls_certificate: CertificateFile = None,
    tls_key: KeyFile = None,
    tls_ca: CaFile = None,
) -> None:
    """Serve AstraFlow's published HTTP endpoints on a run, for trainers and RaaS that exist.

    http://HOST:PORT/docs explains every endpoint. The gateway ends with the run, or at SIGTERM.
    """
    from astraflow.cli.roles import Tls, serve_gateway  # noqa: PLC0415

    raise typer.Exit(
        serve_gateway(
            recipe,
            overrides=[
                *(overrides or []),
                *given("http.host", host),
                *given("http.port", port),
                *(["http.legacy_pickle=true"] if legacy_pickle else []),
            ],
            hub=hub,
            token=token,
            operator_token=operator_token,
            models=pairs(model or [], "--model"),
            tls=Tls(certificate=tls_certificate, key=tls_key, ca=tls_ca),
            as_json=as_json,
        )
    )
