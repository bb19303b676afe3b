"""The commands that are processes of a run: the hub, rollout nodes, trainers."""

import json
import signal
import sys
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
    RunPath,
    directories,
    given,
    run_async,
)
from astraflow.config.run_dir import RunDir

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
    from astraflow.dataflow.compaction import compact  # noqa: PLC0415

    end = run_async(compact(RunDir(run_dir)))
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
    from astraflow.cli.roles import raise_file_limit, traced  # noqa: PLC0415
    from astraflow.config.loader import load_recipe  # noqa: PLC0415
    from astraflow.dataflow.main import main_serve  # noqa: PLC0415
    from astraflow.launch.processes import hold_lifeline  # noqa: PLC0415
    from astraflow.telemetry.logging import configure_logging  # noqa: PLC0415

    configure_logging("hub")
    own = {
        "hub.listen": listen,
        "hub.advertise": advertise,
        "hub.journal.standby": standby or None,
        "hub.tls.certificate": tls_certificate,
        "hub.tls.key": tls_key,
        "hub.tls.ca": tls_ca,
    }
    settings = load_recipe(recipe, [*(overrides or []), *given(own)])
    # SIGTERM would end the run; with a journal, `astraflow run --resume` goes on with it.
    is_kept = settings.hub.journal.kind != "none"
    hold_lifeline(first=signal.SIGKILL if is_kept else signal.SIGTERM)
    raise_file_limit()
    folder = run_dir or Path("runs") / settings.name
    with traced("hub", settings.tracing, folder):
        code = main_serve(settings, run_dir=folder, reopens=reopen)
    raise typer.Exit(code)


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
    from astraflow.cli.roles import begin, tls_of, traced, use_threads  # noqa: PLC0415

    settings = begin(recipe, overrides)
    use_threads(settings.raas.engine.thread_count)
    from astraflow.raas.main import main_join  # noqa: PLC0415

    with traced(name or "raas", settings.tracing, None):
        code = main_join(
            settings,
            hub=hub,
            token=token,
            name=name,
            region=region,
            models=directories(model),
            tls=tls_of(tls_certificate, tls_key, tls_ca),
        )
    raise typer.Exit(code)


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
    from astraflow.launch.operations import drain_member  # noqa: PLC0415

    typer.echo(run_async(drain_member(RunDir(run), name, grace_s=grace_s)))


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
    from astraflow.cli.roles import (  # noqa: PLC0415
        begin,
        make_warm_up,
        must_have_policy,
        tls_of,
        traced,
        use_threads,
    )

    tls = tls_of(tls_certificate, tls_key, tls_ca)
    settings = begin(recipe, overrides)
    must_have_policy(settings, policy)
    if engine is not None:
        own = given({f"policies.{policy}.trainer.engine": engine})
        settings = begin(recipe, [*(overrides or []), *own])
    use_threads(settings.policies[policy].trainer.thread_count)
    from astraflow.trainers.joining import TrainerPlace  # noqa: PLC0415
    from astraflow.trainers.main import is_rank, main_run, rank_mark  # noqa: PLC0415

    folder = run_dir or Path("runs") / settings.name
    model_dir = model or make_warm_up(recipe, overrides, policy=policy)
    rank_count = settings.policies[policy].trainer.ranks
    if rank_count > 1 and not is_rank():
        from astraflow.launch.processes import run_ranks  # noqa: PLC0415 - loads torch
        from astraflow.telemetry.logging import configure_logging  # noqa: PLC0415

        configure_logging(f"trainer-{policy}")
        raise typer.Exit(run_ranks(sys.argv[1:], count=rank_count))
    from astraflow.workflows.agents.template import read_identity  # noqa: PLC0415

    with traced(f"trainer-{policy}{rank_mark()}", settings.tracing, folder):
        place = TrainerPlace(
            hub=hub,
            token=token,
            run_dir=RunDir(folder),
            identity=read_identity(model_dir),
            is_resuming=resume,
            checkpoint_id=checkpoint,
            listen=listen,
            advertise=advertise,
            tls=tls,
            metrics=settings.metrics.listen,
            patience_s=settings.hub.patience_s,
            session_ttl_s=settings.hub.session_ttl_s,
        )
        code = main_run(settings, policy_id=policy, model_dir=model_dir, place=place)
    raise typer.Exit(code)


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

    path = make_warm_up(recipe, overrides, policy=policy)
    if write_path is not None:
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
