"""`astraflow ledger`: the books of a run, checked."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath


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

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.ledger import requeue as issue_again  # noqa: PLC0415
    from astraflow.launch.ledger import show_ledger  # noqa: PLC0415

    if requeue is not None:
        issue_again(RunDir(run), requeue)
    if not show_ledger(RunDir(run), Console(), as_json=as_json):
        raise typer.Exit(1)
