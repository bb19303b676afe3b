"""Runs every check on a recipe, and collects what they find."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from astraflow.config.loader import load_recipe, problems_of
from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError
from astraflow.launch.check import code, data, machine, models, rehearsal, settings
from astraflow.launch.check.guard import (
    UserLoop,
    message_of,
    no_processes,
    reporting_delays,
)
from astraflow.launch.check.subject import CheckReport, Finding, Severity, Subject, refusal
from astraflow.launch.executors.finding import LOCAL, reachable

_NAMED = re.compile(r"([a-z]\w*(?:\.[\w-]+)+): ")
_CHECKS: Sequence[Callable[[Subject], None]] = (
    code.check_packages,
    code.check_tutors,
    models.check_models,
    data.check_data_sets,
    data.check_held_out,
    code.check_workflows,
    rehearsal.check_scorers,
    rehearsal.check_rehearsals,
    code.check_algorithms,
    code.check_engines,
    code.check_training_code,
    code.check_trackers,
    code.check_tracing,
    settings.check_groups,
    settings.check_length,
    settings.check_steps,
    settings.check_routes,
    settings.check_evals,
    settings.check_times,
    settings.check_ports,
    machine.check_listening,
    machine.check_tls,
    machine.check_folders,
    machine.check_servers,
    machine.check_executor,
    machine.check_gpus,
    machine.check_capacity,
    machine.check_autoscaling,
)
"""In this order: later ones use what earlier ones made."""


def check_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    is_elsewhere: bool = False,
    limit_s: float = 1.5,
) -> CheckReport:
    """Find all faults of a recipe that can be found without a run.

    Code that it names is imported and run on some rows, each for a limited time. No process is
    started, nothing is downloaded and nothing is written.

    Args:
        path: Of the recipe.
        overrides: Each `a.b=value`.
        runs: Folder that is to keep the run.
        is_elsewhere: The recipe is for another machine: what depends on this one is a note.
        limit_s: Seconds for one piece of the user's code on the rows of one data set.
    """
    started = time.monotonic()
    recipe = None
    try:
        recipe = reachable(load_recipe(path, overrides))
    except AstraflowError as refused:
        findings = _schema_faults(refused)
    else:
        loop = UserLoop(limit_s)
        subject = Subject(recipe=recipe, source=path.absolute(), runs=runs, loop=loop)
        with no_processes(), reporting_delays():
            for check in _CHECKS:
                try:
                    check(subject)
                except Exception as failed:  # noqa: BLE001 - the others are made all the same
                    subject.error(
                        "",
                        f"internal error: {check.__module__}.{check.__name__} failed with "
                        f"{message_of(failed)}",
                        "please report it; --no-check runs the recipe all the same",
                    )
        loop.close()
        findings = subject.findings
    if is_elsewhere or (recipe is not None and recipe.executor.name != LOCAL):
        findings = [finding.elsewhere() for finding in findings]
    return CheckReport(
        source=path, recipe=recipe, findings=findings, wall_s=time.monotonic() - started
    )


def _schema_faults(refused: AstraflowError) -> list[Finding]:
    cause = refused.__cause__
    if not isinstance(cause, ValidationError):
        return [refusal(refused.metadata.get("field", ""), refused)]
    found: list[Finding] = []
    for place, problem in problems_of(cause, Recipe):
        named = _NAMED.match(problem)
        if not place and named:
            # What parts of a recipe say of each other has its place in the message.
            place, problem = named.group(1), problem[named.end() :]  # noqa: PLW2901
        what, _, cure = problem.partition("; ")
        cure = cure or "`astraflow config schema` has every key"
        found.append(Finding(severity=Severity.ERROR, place=place, what=what, cure=cure))
    return found
