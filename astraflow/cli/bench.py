"""`astraflow bench`: what this machine, a link and real weights are good for."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson
from astraflow.core.versions import Lane

app = typer.Typer(
    no_args_is_help=True, help="Measure how fast weights travel here, and how small they get."
)


@app.command("link")
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
        list[Lane] | None,
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
    from astraflow.launch.bench.link_view import pull_here, pull_there, serve  # noqa: PLC0415

    nbytes = megabytes * 1_000_000
    if listen is not None:
        serve(nbytes, listen=listen, advertise=advertise, as_json=as_json)
    elif source is not None:
        pull_there(source, token, lanes=lanes, rounds=rounds, as_json=as_json)
    else:
        pull_here(nbytes, lanes=lanes, rounds=rounds, as_json=as_json)
