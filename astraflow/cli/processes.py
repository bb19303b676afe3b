"""The commands that are processes of a run: the hub, rollout nodes, trainers, the HTTP gateway."""

from pathlib import Path
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
    RunFolder,
    RunPath,
    directories,
)

dataflow_app = typer.Typer(
    no_args_is_help=True, help="The hub: prompts, tasks, rollouts, batches, versions."
)


@dataflow_app.callback()
def _dataflow() -> None: ...


@dataflow_app.command("compact")
def compact_journal(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run; its hub has to be stopped.")],
) -> None:
    """Let a snapshot take the place of a run's journal, so that another release goes on from it.

    With the release that wrote the journal: another one may decide otherwise, and refuses then.
    """
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.dataflow.compaction import compact  # noqa: PLC0415

    end = asyncio.run(compact(RunDir(run_dir)))
    typer.echo(f"{run_dir}: the snapshot holds {end} records; any release that reads it goes on")


@dataflow_app.command("serve")
def serve_dataflow(
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
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait until the hub that serves the run is gone, then go on with it."
        ),
    ] = False,
    reopen: Annotated[
        bool,
        typer.Option(
            "--reopen",
            help="Go on with a run that was stopped, failed or reached its end, for as many steps "
            "as the recipe says now.",
        ),
    ] = False,
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
                *given("hub.journal.standby", standby or None),
                *given("hub.tls.certificate", tls_certificate),
                *given("hub.tls.key", tls_key),
                *given("hub.tls.ca", tls_ca),
            ],
            run_dir=run_dir,
            reopens=reopen,
        )
    )


def given(key: str, value: object) -> list[str]:
    """Return an override of the recipe for an option that was given."""
    return [] if value is None else [f"{key}={value}"]


raas_app = typer.Typer(no_args_is_help=True, help="Rollout as a service: nodes that run workflows.")


@raas_app.command()
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


@raas_app.command()
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
    from astraflow.launch.operations import drain_member  # noqa: PLC0415

    typer.echo(asyncio.run(drain_member(RunDir(run), name, grace_s=grace_s)))


trainer_app = typer.Typer(no_args_is_help=True, help="Trainers: one process per policy.")

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


@trainer_app.command("run")
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


@trainer_app.command("warm-up")
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


@trainer_app.command("merge")
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
    from astraflow.cli.roles import serve_gateway, tls_of  # noqa: PLC0415

    raise typer.Exit(
        serve_gateway(
            recipe,
            overrides=[*(overrides or []), *_http(host, port, legacy_pickle=legacy_pickle)],
            hub=hub,
            token=token,
            operator_token=operator_token,
            http_token=http_token,
            models=directories(model),
            tls=tls_of(tls_certificate, tls_key, tls_ca),
            as_json=as_json,
        )
    )


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
    from astraflow.cli.roles import serve_raas as serve  # noqa: PLC0415

    raise typer.Exit(
        serve(
            recipe,
            overrides=[*(overrides or []), *_http(host, port, legacy_pickle=legacy_pickle)],
            dataflow=dataflow,
            uid=uid,
            models=directories(model),
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
