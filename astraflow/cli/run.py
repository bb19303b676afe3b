"""`astraflow run`, and the commands that look at a run, check one, or steer it."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from astraflow.cli.options import AsJson, Overrides, RecipePath, RunPath, run_async
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason

if TYPE_CHECKING:
    from astraflow.config.recipe import Recipe
    from astraflow.launch.summary import RunSummary

OptionalRecipe = Annotated[
    Path | None,
    typer.Argument(metavar="RECIPE", help="Recipe, such as recipes/sort.yaml.", show_default=False),
]


def run(
    recipe: OptionalRecipe = None,
    *,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where trainers and nodes are started: local, ssh, slurm, kubernetes, ray or "
            "skypilot; unset: as the recipe's [bold]executor[/] says. The hub stays here.",
        ),
    ] = None,
    on_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of that place, such as [bold]partition=gpu[/] or "
            r"[bold]hosts=\[a,b][/]. Can be given many times.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; unset: the recipe's.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that keeps the runs.")] = Path("runs"),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolved recipe, which process gets which GPUs, and what is wrong; "
            "with another place than local the scripts or manifests of its processes.",
        ),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="Start what [bold]astraflow check[/] refuses, where it is wrong."
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Folder of a run, such as [bold]runs/sort[/], whose processes died, that was "
            "stopped or reached its end: go on with it from its journal and its last checkpoints. "
            "With --set for more steps, another rate, other nodes.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --resume: go back to this checkpoint of [bold]astraflow save[/].",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train what a recipe describes: starts the hub, the rollout nodes and the trainers.

    Looks for faults first, as [bold]astraflow check[/] does. Shows progress, and ends with a
    table of what came of it. Ctrl-C once finishes what is under way and trains on it, or stops
    what has not begun; twice stops within seconds; --resume goes on. Exit code 0: the run reached
    its end; 1: it failed; 2: the recipe was refused, and nothing was started; 130: it was stopped.
    """
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=as_json)
    overrides = [*(overrides or []), *_placed(on, on_set or [])]
    if resume is not None:
        _must_stand_alone(recipe=recipe, name=name, dry_run=dry_run)
        from astraflow.launch.launcher import resume_run  # noqa: PLC0415

        summary = resume_run(
            resume, console=console, overrides=overrides, checkpoint_id=checkpoint or ""
        )
        _end(summary, as_json=as_json)
        return
    if checkpoint is not None:
        raise typer.BadParameter("only a run that is resumed goes back", param_hint="--checkpoint")
    if recipe is None:
        raise typer.BadParameter("give a recipe, or --resume RUN", param_hint="RECIPE")
    named = [f"name={json.dumps(name)}"] if name is not None else []
    settings = _checked(
        recipe,
        [*overrides, *named],
        runs,
        is_dry=dry_run,
        is_bound=not no_check,
        as_json=as_json,
    )
    if dry_run:
        return
    from astraflow.launch.launcher import run_recipe  # noqa: PLC0415

    _end(run_recipe(settings, runs=runs, console=console), as_json=as_json)


def _placed(place: str | None, options: list[str]) -> list[str]:
    """Return overrides of the recipe's executor; another place has none of the former's options."""
    for each in options:
        if "=" not in each:
            raise typer.BadParameter(f"{each}: give KEY=VALUE", param_hint="--on-set")
    named = [] if place is None else [f"executor={{name: {json.dumps(place)}}}"]
    return [*named, *(f"executor.options.{each}" for each in options)]


def _checked(
    path: Path,
    overrides: list[str],
    runs: Path,
    *,
    is_dry: bool,
    is_bound: bool,
    as_json: bool,
) -> "Recipe":
    """Return a recipe that can be run; else say why not, and exit."""
    from astraflow.launch.check import check_recipe  # noqa: PLC0415
    from astraflow.launch.check.subject import Severity, show_report  # noqa: PLC0415

    report = check_recipe(path, overrides, runs=runs)
    if is_dry and report.recipe is not None:
        _show_dry(report.recipe, RunDir(runs / report.recipe.name), as_json=as_json)
    if any(finding.severity is not Severity.NOTE for finding in report.findings):
        from rich.console import Console  # noqa: PLC0415

        show_report(Console(stderr=True), report, has_notes=is_dry)
    if report.recipe is None or (report.errors and is_bound):
        raise typer.Exit(REFUSED)
    return report.recipe


def _show_dry(recipe: "Recipe", run_dir: RunDir, *, as_json: bool) -> None:
    """Print a recipe with every default, and the plan of its GPUs; comments, so YAML stays YAML.

    With an executor for other machines it is what they would be given.
    """
    from astraflow.config.loader import dump_recipe  # noqa: PLC0415
    from astraflow.launch.executors.finding import Placement  # noqa: PLC0415

    plan, scripts = None, dict[str, str]()
    # What the check says as well.
    with suppress(AstraflowError):
        places = Placement.of(recipe, run_dir, note=typer.echo)
        plan, scripts = places.gpus, dict(places.preview(run_dir))
    if as_json:
        gpus = None if plan is None else plan.to_json()
        said = {"recipe": recipe.model_dump(mode="json"), "gpus": gpus, "scripts": scripts}
        typer.echo(json.dumps(said, indent=2))
        return
    typer.echo("\n".join(scripts.values()) if scripts else dump_recipe(recipe))
    for line in () if plan is None else plan.lines():
        typer.echo(f"# {line}")


def _must_stand_alone(**others: object) -> None:
    """Refuse what would make another run of the one to go on with."""
    given = [key for key, value in others.items() if value]
    if given:
        raise typer.BadParameter(
            f"the run has its own recipe; leave out {', '.join(given)}", param_hint="--resume"
        )


def _end(summary: "RunSummary", *, as_json: bool) -> None:
    """Print the summary for machines, and exit as the run did."""
    if as_json:
        typer.echo(json.dumps(summary.to_json()))
    if summary.failure:
        typer.secho(f"error: the run failed: {summary.failure}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1)
    if summary.was_stopped:
        raise typer.Exit(130)


REFUSED = 2

"""Exit code of a recipe that is refused."""


def check(
    recipe: RecipePath,
    *,
    overrides: Overrides = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="The recipe is for another machine: what this one lacks is a note.",
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder that is to keep the run.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look for faults in a recipe, and say what to do about each.

    Reads data sets, tokenizers and templates, imports the code that the recipe names, and runs
    workflows and scorers on some rows with answers that are right and wrong. Starts no process,
    downloads nothing, writes nothing. Exit code 2: it has errors, and a run would be refused.
    """
    from astraflow.launch.check import check_recipe  # noqa: PLC0415

    report = check_recipe(recipe, overrides or [], runs=runs, is_elsewhere=elsewhere)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415

        from astraflow.launch.check.subject import show_report  # noqa: PLC0415

        show_report(Console(), report)
    if report.errors:
        raise typer.Exit(REFUSED)


def status(
    run: RunPath,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until the run is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show policies, members, books and what each trainer waits for.

    Reads the hub's address and token from the run's folder.
    """
    from astraflow.launch.status import show_status  # noqa: PLC0415

    run_async(show_status(RunDir(run), watch=watch, as_json=as_json))


def explain(run: RunPath, *, as_json: AsJson = False) -> None:
    """Say what each trainer waits for, link by link, down to who could change it.

    Reads the hub's address and token from the run's folder.
    """
    from astraflow.launch.status import show_waits  # noqa: PLC0415

    typer.echo(run_async(show_waits(RunDir(run), as_json=as_json)))


def ledger(
    run: RunPath,
    *,
    requeue: Annotated[
        str | None, typer.Option(metavar="PROMPT", help="Issue this dead letter again first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the books of a run and check them against its journal; list the prompts given up.

    Reads the journal in the run's folder, also beside a hub that writes it; asks the hub where
    there is none. Exit code 1: the books do not hold.
    """
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.ledger import requeue as issue_again  # noqa: PLC0415
    from astraflow.launch.ledger import show_ledger  # noqa: PLC0415

    if requeue is not None:
        run_async(issue_again(RunDir(run), requeue))
    if not show_ledger(RunDir(run), Console(), as_json=as_json):
        raise typer.Exit(1)


def rollouts(
    run: RunPath,
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Show so many.")] = 10,
    policy: Annotated[str | None, typer.Option(help="Only of this policy.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only with at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only with at most this.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at the newest sampled rollouts of a run: prompt, text, reward and its parts."""
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.samples import find_rollouts, show_rollouts  # noqa: PLC0415

    found = find_rollouts(
        RunDir(run), count=count, policy=policy, min_reward=min_reward, max_reward=max_reward
    )
    show_rollouts(Console(), RunDir(run), found, as_json=as_json)


def track(
    run: RunPath,
    *,
    to: Annotated[
        list[str],
        typer.Option(
            "--to", help="tensorboard, wandb, mlflow, trackio or module:Class; many times."
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is still to come, until interrupted.")
    ] = False,
) -> None:
    """Show the numbers of a run, live or over, in TensorBoard, W&B, MLflow or trackio.

    What was shown before in this run's folder is not shown again. A recipe's `track` does the
    same while it runs.
    """
    from astraflow.launch.tracking.follower import track_run  # noqa: PLC0415

    for name, count in track_run(RunDir(run), to, is_live=follow):
        typer.echo(f"{name}: {count} rows")


def save(
    run: RunPath,
    *,
    checkpoint_id: Annotated[
        str | None,
        typer.Option("--id", metavar="NAME", help="Of the checkpoint; unset: its date and time."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for the slowest trainer.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Save a live run under one id: weights, optimizers, buffers, data positions and versions.

    Every trainer saves after its step in progress, or at once while it waits for a batch. Go back
    to it with [bold]astraflow run --resume RUN --checkpoint NAME[/]. With the same name it can be
    asked for again, for example when a trainer was away. Exit code 1: not every trainer has saved.
    """
    from astraflow.launch.operations import save_run  # noqa: PLC0415

    run_async(
        save_run(RunDir(run), checkpoint_id=checkpoint_id, timeout_s=timeout_s, as_json=as_json)
    )


def token(
    run: RunPath,
    role: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLE",
            help="node, relay, trainer, trainer:POLICY, reader or operator.",
            show_default=False,
        ),
    ] = None,
    *,
    revoke: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Take a token back, by its id or the token itself."),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Until it expires; unset: it does not.", min=0.0)
    ] = None,
) -> None:
    """Print a token of a run for one role, to be given away as ASTRAFLOW_JOIN_TOKEN.

    Its bearer does what the role does and no more: a node trains nothing and publishes nothing, a
    relay takes no tasks, a reader looks and changes nothing. It is good until it expires, is
    revoked, or the run gets another operator token. Its id goes to the standard error.
    """
    from astraflow.config.loader import load_recipe  # noqa: PLC0415
    from astraflow.launch.operations import revoke_token  # noqa: PLC0415
    from astraflow.rpc.access import Grant, HubTokens, token_id_of  # noqa: PLC0415

    if (role is None) is (revoke is None):
        raise typer.BadParameter("give a ROLE, or --revoke ID")
    if revoke is not None:
        ended = run_async(revoke_token(RunDir(run), revoke))
        typer.echo(f"revoked; sessions that ended: {', '.join(ended) or 'none'}")
        return
    endpoint = RunDir(run).read_endpoint()
    policy = Grant.parse(cast("str", role)).policy_id
    if policy and policy not in (known := load_recipe(RunDir(run).recipe).policies):
        names = ", ".join(known)
        raise AstraflowError(Reason.POLICY_UNKNOWN, f"{role}: the recipe has {names}")
    tokens = HubTokens(join=endpoint.join_token, operator=endpoint.operator_token)
    expire_time = 0.0 if hours is None else time.time() + 3600 * hours
    made = tokens.of_role(cast("str", role), expire_time=expire_time)
    typer.echo(f"id {token_id_of(made)}", err=True)
    typer.echo(made)


def autoscale(
    run: RunPath,
    *,
    advise: Annotated[
        bool, typer.Option("--advise", help="Print the hub's advice once and change nothing.")
    ] = False,
    poll_s: Annotated[
        float, typer.Option("--poll", min=0.05, help="Seconds between two looks.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Start and drain rollout nodes as the hub advises, until the run is over.

    Nodes are started where those of the run are, or by the recipe's autoscale.start. A node
    that is not needed finishes what it holds and leaves; nothing is lost. Ctrl-C ends the scaling;
    nodes that it started drain and leave then, but those of autoscale.start.
    """
    from astraflow.launch import autoscale as launch  # noqa: PLC0415

    if advise:
        run_async(launch.show_advice(RunDir(run), as_json=as_json))
    else:
        run_async(launch.autoscale(RunDir(run), poll_s=poll_s, as_json=as_json))
