"""`astraflow gateway`: HTTP for peers that exist already."""

from typing import Annotated

import typer

from astraflow.cli.options import (
    AsJson,
    CaFile,
    CertificateFile,
    HubAddress,
    JoinToken,
    KeyFile,
    Overrides,
    RecipePath,
    directories,
    given,
)

gateway_app = typer.Typer(no_args_is_help=True, help="HTTP for peers that exist already.")

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


@gateway_app.command("serve")
def serve_http(
    recipe: RecipePath,
    hub: HubAddress,
    token: JoinToken,
    *,
    overrides: Overrides = None,
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
    as_json: AsJson = False,
    tls_certificate: CertificateFile = None,
    tls_key: KeyFile = None,
    tls_ca: CaFile = None,
) -> None:
    """Serve AstraFlow's published HTTP endpoints on a run, for trainers and RaaS that exist.

    http://HOST:PORT/docs explains every endpoint. The gateway ends with the run, or at SIGTERM.
    """
    from astraflow.cli.roles import begin, http_extra, tls_of  # noqa: PLC0415

    own = _http(host, port, legacy_pickle=legacy_pickle)
    settings = begin(recipe, [*(overrides or []), *own])
    with http_extra():
        from astraflow.gateway.serve import main_gateway  # noqa: PLC0415
        from astraflow.gateway.settings import GatewaySettings, dial_of, first_models, rules_of  # noqa: PLC0415
    tls = tls_of(tls_certificate, tls_key, tls_ca)
    gateway = GatewaySettings(
        recipe=settings,
        hub=hub,
        token=token,
        operator_token=operator_token,
        models=first_models(settings, directories(model)),
        rules=rules_of(settings.http),
        dial=dial_of(settings.http, tls),
        http_token=http_token,
        tls=tls,
    )
    raise typer.Exit(main_gateway(gateway, as_json=as_json))


@gateway_app.command("raas")
def serve_raas(
    recipe: RecipePath,
    *,
    overrides: Overrides = None,
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
    as_json: AsJson = False,
) -> None:
    """Serve an existing Dataflow with this machine's engines, as one RaaS of it.

    Run it on every machine with engines. There is no run of ours: prompts, versions and evaluations
    are the Dataflow's, workflows, sampling and engines the recipe's.
    """
    from astraflow.cli.roles import begin, http_extra, use_threads  # noqa: PLC0415

    own = _http(host, port, legacy_pickle=legacy_pickle)
    settings = begin(recipe, [*(overrides or []), *own])
    use_threads(settings.raas.engine.thread_count)
    with http_extra():
        from astraflow.gateway.raas.node import RaasSettings  # noqa: PLC0415
        from astraflow.gateway.raas.serve import main_raas  # noqa: PLC0415
        from astraflow.gateway.settings import dial_of, rules_of  # noqa: PLC0415
    from astraflow.raas.main import model_directories  # noqa: PLC0415

    node = RaasSettings(
        recipe=settings,
        models=model_directories(settings, directories(model)),
        rules=rules_of(settings.http),
        dial=dial_of(settings.http),
        http_token=http_token,
        **({} if uid is None else {"uid": uid}),
    )
    raise typer.Exit(main_raas(node, dataflow=dataflow, as_json=as_json))


def _http(host: str | None, port: int | None, *, legacy_pickle: bool) -> list[str]:
    pickles = "true" if legacy_pickle else None
    return given({"http.host": host, "http.port": port, "http.legacy_pickle": pickles})
