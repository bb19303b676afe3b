"""`astraflow status`: what a run does now."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath


def status(
    run: RunPath,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until the run is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show policies, members, books and what each trainer waits for.

    Reads the hub's address and token from the run's folder.
    """
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.status import show_status  # noqa: PLC0415

    asyncio.run(show_status(RunDir(run), watch=watch, as_json=as_json))
