"""`astraflow simulate`: a pool of any size, without GPUs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson

ScenarioOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the scenario, such as [bold]pools.pool.count=20[/]. "
        "Can be given many times.",
    ),
]


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCENARIO",
            help="YAML file; unset: eight equal nodes for an hour.",
            show_default=False,
        ),
    ] = None,
    *,
    overrides: ScenarioOverrides = None,
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="Also simulate equal nodes of the same total speed."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a run: discrete events over the same state machine that the hub runs.

    Nodes of different speeds join, leave and crash; the trainer's steps take as long as the
    scenario says. Tells how long the trainer waited, how stale its rollouts were and what nodes
    cost. Exit code 1: a law did not hold.
    """
    from astraflow.simulate.scenario import load_scenario, oracle_of  # noqa: PLC0415
    from astraflow.simulate.simulation import show  # noqa: PLC0415
    from astraflow.simulate.simulation import simulate as run  # noqa: PLC0415
    from astraflow.telemetry.garbage import collect_rarely  # noqa: PLC0415

    collect_rarely()
    settings = load_scenario(scenario, overrides or [])
    even = oracle_of(settings) if oracle else None
    report = run(settings)
    best = None if even is None else run(even)
    if as_json:
        fields = report.to_json()
        if best is not None:
            fields["oracle"] = best.to_json()
        typer.echo(json.dumps(fields))
    else:
        show(report, best)
    if report.broken_laws:
        raise typer.Exit(1)
