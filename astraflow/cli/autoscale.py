"""`astraflow autoscale`: keeps the pool as large as it should be."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath


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

    Nodes are processes on this machine, or whatever the recipe's autoscale.start starts. A node
    that is not needed finishes what it holds and leaves; nothing is lost. Ctrl-C ends the scaling;
    nodes of this machine drain and leave then.
    """
    import asyncio  # noqa: PLC0415

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch import autoscale as launch  # noqa: PLC0415

    if advise:
        asyncio.run(launch.show_advice(RunDir(run), as_json=as_json))
    else:
        asyncio.run(launch.autoscale(RunDir(run), poll_s=poll_s, as_json=as_json))
