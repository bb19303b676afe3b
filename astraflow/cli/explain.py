"""`astraflow explain`: why a run waits."""

import typer

from astraflow.cli.options import AsJson, RunPath


def explain(run: RunPath, *, as_json: AsJson = False) -> None:
    """Say what each trainer waits for, link by link, down to who could change it.

    Reads the hub's address and token from the run's folder.
    """
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.explain import show_waits  # noqa: PLC0415

    typer.echo(asyncio.run(show_waits(RunDir(run), as_json=as_json)))
