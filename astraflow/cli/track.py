"""`astraflow track`: the numbers of a run, in another place."""

from typing import Annotated

import typer

from astraflow.cli.options import RunPath


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
    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.tracking.follower import track_run  # noqa: PLC0415

    for name, count in track_run(RunDir(run), to, is_live=follow):
        typer.echo(f"{name}: {count} rows")
