"""`astraflow save`: one checkpoint of a whole run."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath


def save(
    run: RunPath,
    *,
    checkpoint_id: Annotated[
        str | None,
        typer.Option("--id", metavar="NAME", help="Of the checkpoint; unset: by the time of day."),
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
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.save import save_run  # noqa: PLC0415

    asyncio.run(
        save_run(RunDir(run), checkpoint_id=checkpoint_id, timeout_s=timeout_s, as_json=as_json)
    )
