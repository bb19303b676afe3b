"""`astraflow ui`: a page that shows runs."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import run_async
from astraflow.core.errors import AstraflowError, Reason


def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...", help="Folders of runs; unset: all of runs/.", show_default=False
        ),
    ] = None,
    *,
    port: Annotated[int, typer.Option(help="To listen on; 0: one that is free.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser there.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the page of one run there instead: it opens as a file, or from any web "
            "server.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show runs, live or over, on a page of this machine: from a reward down to a token.

    Nobody but you can open it, and nothing leaves this machine. Curves of several runs lie over
    each other; a click on a step shows its groups, a click on a rollout its text.
    """
    from astraflow.launch.runs import UNREADABLE, list_runs  # noqa: PLC0415
    from astraflow.ui.export import export_page  # noqa: PLC0415
    from astraflow.ui.server import serve_until_told, shown_runs  # noqa: PLC0415

    folders = runs or [
        Path("runs") / row["name"] for row in list_runs(Path("runs")) if row["state"] != UNREADABLE
    ]
    if not folders:
        raise AstraflowError(
            Reason.NOT_READY, "runs has no run; start one: `astraflow run`, or name a RUN"
        )
    shown = shown_runs(folders)
    if export is None:
        run_async(serve_until_told(shown, port=port, opens=not no_open))
        return
    if len(shown) != 1:
        raise typer.BadParameter("name the one RUN that is to be exported", param_hint="--export")
    count = run_async(export_page(shown[0], export))
    typer.echo(f"{export / 'index.html'} shows {shown[0].key} with {count} rollouts")
