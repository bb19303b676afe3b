"""`astraflow gateway`: the HTTP endpoints of existing peers."""

from typing import Annotated

import typer

from astraflow.cli import options as opt
from astraflow.cli.dataflow import given

app = typer.Typer(no_args_is_help=True, help="HTTP for peers that exist already.")

Host = Annotated[str | None, typer.Option(help="To listen on; unset: the recipe's http.host.")]
Port = Annotated[int | None, typer.Option(help="To listen on; unset: the recipe's http.port.")]
FirstModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="POLICY=DIR", help="First weights of a policy; unset: the recipe's."
    ),
]
LegacyPickle = Annotated[
    bool, typer.Option("--legacy-pickle", help="Read pickled requests; nothing in them runs.")
]
HttpToken = Annotated[
    str,
    typer.Option(
        help="That callers show as Authorization: Bearer; unset: they show none.",
        envvar="ASTRAFLOW_HTTP_TOKEN",
        show_default=False,
    ),
]


@app.callback()
def _group() -> None: ...


@app.command()
def serve(
    recipe: opt.RecipePath,
    hub: opt.HubAddress,
    token: opt.JoinToken,
    *,
    overrides: opt.Overrides = None,
    operator_token: Annotated[
        str | None,
        typer.Option(
            help="Operator token of the run; unset: no /status, /raas_pool, /shutdown, run_eval.",
            envvar="ASTRAFLOW_OPERATOR_TOKEN",
        ),
    ] = None,
    http_token: HttpToken = "",
    host: Host = None,
    port: Port = None,
    model: FirstModels = None,
    legacy_pickle: LegacyPickle = False,
    as_json: opt.AsJson = False,
    tls_certificate: opt.CertificateFile = None,
    tls_key: opt.KeyFile = None,
    tls_ca: opt.CaFile = None,
) -> None:
    """Serve AstraFlow's published HTTP endpoints on a run, for trainers and RaaS that exist.

    http://HOST:PORT/docs explains every endpoint. The gateway ends with the run, or at SIGTERM.
    """
    from astraflow.cli.roles import serve_gateway, tls_of  # noqa: PLC0415

    raise typer.Exit(
        serve_gateway(
            recipe,
            overrides=[*(overrides or []), *_http(host, port, legacy_pickle=legacy_pickle)],
            hub=hub,
            token=token,
            operator_token=operator_token,
            http_token=http_token,
            models=opt.directories(model),
            tls=tls_of(tls_certificate, tls_key, tls_ca),
            as_json=as_json,
        )
    )


@app.command()
def raas(
    recipe: opt.RecipePath,
    *,
    overrides: opt.Overrides = None,
    dataflow: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Dataflow to register at, again where it forgot; unset: at none."
        ),
    ] = None,
    uid: Annotated[
        str | None, typer.Option(help="Its name at the Dataflow; unset: raas- and a number.")
    ] = None,
    http_token: HttpToken = "",
    host: Host = None,
    port: Port = None,
    model: FirstModels = None,
    legacy_pickle: LegacyPickle = False,
    as_json: opt.AsJson = False,
) -> None:
    """Serve an existing Dataflow with this machine's engines, as one RaaS of it.

    Run it on every machine with engines. There is no run of ours: prompts, versions and evaluations
    are the Dataflow's, workflows, sampling and engines the recipe's.
    """
    from astraflow.cli.roles import serve_raas  # noqa: PLC0415

    raise typer.Exit(
        serve_raas(
            recipe,
            overrides=[*(overrides or []), *_http(host, port, legacy_pickle=legacy_pickle)],
            dataflow=dataflow,
            uid=uid,
            models=opt.directories(model),
            http_token=http_token,
            as_json=as_json,
        )
    )


def _http(host: str | None, port: int | None, *, legacy_pickle: bool) -> list[str]:
    return [
        *given("http.host", host),
        *given("http.port", port),
        *(["http.legacy_pickle=true"] if legacy_pickle else []),
    ]
