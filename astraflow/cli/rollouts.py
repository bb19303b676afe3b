"""`astraflow rollouts`: what the policies wrote, and what they got for it."""

from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath


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

    from astraflow.config.run_dir import RunDir  # noqa: PLC0415
    from astraflow.launch.samples import Wanted, find_rollouts, show_rollouts  # noqa: PLC0415

    wanted = Wanted(policy=policy, min_reward=min_reward, max_reward=max_reward)
    found = find_rollouts(RunDir(run), wanted=wanted, count=count)
    show_rollouts(Console(), RunDir(run), found, as_json=as_json)
