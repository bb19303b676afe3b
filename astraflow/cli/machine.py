"""`astraflow doctor` and `astraflow bench`: what this machine and a link are good for."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind


def doctor(*, as_json: AsJson = False) -> None:
    """Check versions, machine, ports, devices, lanes and engines, and say what to do.

    Exit code 1 when something that a run needs does not work.
    """
    from astraflow.launch.doctor import examine  # noqa: PLC0415

    checks = list(examine())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table("area", "what", "", "found")
        # A line of it is to be pasted.
        table.add_column("to do", overflow="fold")
        marks = {True: "[green]works[/]", False: "[red]broken[/]", None: "[dim]not here[/]"}
        for check in checks:
            found, advice = Text(check.found), Text(check.advice)
            table.add_row(check.area, check.name, marks[check.works], found, advice)
        Console().print(table)
    if any(check.works is False for check in checks):
        raise typer.Exit(1)


bench_app = typer.Typer(
    no_args_is_help=True, help="Measure how fast weights travel here, and how small they get."
)


@bench_app.command("link")
def link(
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Be the end that serves, until interrupted; prints what to run on the other.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="How the other end dials it: auto, fqdn, a host or IP."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST:PORT", help="Be the end that pulls from there."),
    ] = None,
    token: Annotated[
        str, typer.Option("--token", help="That the serving end printed.", show_default=False)
    ] = "",
    megabytes: Annotated[
        int, typer.Option("--mb", min=1, help="Size of what is served, in MB.")
    ] = 256,
    lanes: Annotated[
        list[LaneKind] | None,
        typer.Option("--lane", help="Only this one; can be given many times. Unset: all."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Pulls over each lane.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how fast weights come over a link, lane by lane.

    Without --listen and --from both ends are on this machine. Between two machines, start the
    first with --listen; it prints the command for the second. What it serves is random bytes,
    in the clear; who has the token is let in.
    """
    from astraflow.launch.bench.link import pull_here, pull_there, serve  # noqa: PLC0415

    nbytes = megabytes * 1_000_000
    if listen is not None:
        serve(nbytes, listen=listen, advertise=advertise, as_json=as_json)
    elif source is not None:
        pull_there(source, token, lanes=lanes, rounds=rounds, as_json=as_json)
    else:
        pull_here(nbytes, lanes=lanes, rounds=rounds, as_json=as_json)


@bench_app.command("codec")
def codec(
    old: Annotated[
        Path | None,
        typer.Argument(
            metavar="A", help="A safetensors file or a folder; unset: made up.", show_default=False
        ),
    ] = None,
    new: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="The version after it.", show_default=False),
    ] = None,
    *,
    elements: Annotated[
        int, typer.Option("--elements", min=1 << 16, help="Of the weights that are made up.")
    ] = 1 << 24,
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=1.0, help="Of them that change.")
    ] = 0.01,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="The best one counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how small and how fast a version is coded, on one core of this machine.

    With two checkpoints of one training run it tells what a step of yours would cost on the wire;
    without, weights are made up as a step of Adam changes them.
    """
    from astraflow.launch.bench.codec import from_files, made_up, show_codec  # noqa: PLC0415

    if (old is None) != (new is None):
        raise AstraflowError(Reason.INVALID_FIELD, "give both versions, A and B, or none")
    versions = from_files(old, new) if old and new else made_up(elements, share)
    show_codec(versions, repeats=repeats, as_json=as_json)
