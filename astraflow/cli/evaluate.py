"""`astraflow eval`: saved checkpoints, measured again."""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.cli.options import AsJson, Overrides, RunPath, pairs, run_async
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId

if TYPE_CHECKING:
    from astraflow.core.evals import EvalRun
    from astraflow.launch.evaluate import SuiteResult


Steps = Annotated[
    list[str] | None,
    typer.Option(
        "--step",
        help="first, last or a number of steps; can be given many times.",
        show_default="first and last",
    ),
]
SuiteName = Annotated[
    str | None, typer.Option("--suite", help="A suite of the recipe; unset: the first.")
]
Live = Annotated[
    bool, typer.Option("--live", help="Ask the run itself, which goes on training meanwhile.")
]
Versions = Annotated[
    list[str] | None,
    typer.Option(
        "--version",
        metavar="POLICY=VERSION",
        help="With --live: what to measure; unset: the newest.",
    ),
]
Share = Annotated[
    float | None,
    typer.Option(
        "--share", min=0.0, max=1.0, help="With --live: of the pool; unset: the recipe's."
    ),
]


def evaluate(
    run: RunPath,
    *,
    step: Steps = None,
    suite: SuiteName = None,
    live: Live = False,
    version: Versions = None,
    share: Share = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure checkpoints of a run on a suite of its recipe, in this process or in the run.

    Prompts, sampling and seeds are those of the run: the same weights give the same result.
    """
    from astraflow.config.loader import load_recipe  # noqa: PLC0415

    run_dir = RunDir(run)
    if not run_dir.recipe.exists():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{run} is not the folder of a run: it has no recipe.yaml"
        )
    recipe = load_recipe(run_dir.recipe, overrides or [])
    name = suite or next(iter(recipe.evals), "")
    if name not in recipe.evals:
        known = ", ".join(recipe.evals) or "none"
        raise AstraflowError(Reason.EVAL_UNKNOWN, f"--suite {name}: the recipe has {known}")
    if live:
        _ask(run_dir, name, version or [], share, as_json=as_json)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.raas.engine.thread_count))
    from rich.console import Console  # noqa: PLC0415

    from astraflow.launch.evaluate import evaluate_suite, find_checkpoints  # noqa: PLC0415
    from astraflow.launch.status import text_of  # noqa: PLC0415

    console = Console(stderr=True)

    def note(failure: Failure) -> None:
        console.print(text_of(failure), soft_wrap=True)

    for each in step or ["first", "last"]:
        checkpoints = find_checkpoints(recipe, run_dir, each)
        result = run_async(evaluate_suite(recipe, name, checkpoints, note=note))
        _show(result, each, as_json=as_json)


def _ask(
    run_dir: RunDir, suite: str, version: list[str], share: float | None, *, as_json: bool
) -> None:
    from astraflow.launch.operations import evaluate_live  # noqa: PLC0415

    pinned: dict[PolicyId, int] = {}
    for policy, text in pairs(version, "--version").items():
        if not text.isdecimal():
            raise AstraflowError(Reason.INVALID_FIELD, f"--version: '{text}' is no version number")
        pinned[PolicyId(policy)] = int(text)

    def note(seen: "EvalRun") -> None:
        if seen.failure is not None and not as_json:
            typer.echo(f"waits: {seen.failure.message}", err=True)

    asked = evaluate_live(run_dir, suite, versions=pinned, pool_share=share, note=note)
    done = run_async(asked)
    versions = ", ".join(f"{policy} {number}" for policy, number in done.versions.items())
    _show(done, versions, as_json=as_json)


def _show(result: "SuiteResult | EvalRun", step: str, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Any] = asdict(result) | {"step": step}
        typer.echo(json.dumps(fields, default=str))
        return
    whole = [result.overall] if result.overall and len(result.results) > 1 else []
    for each in [*result.results, *whole]:
        parts = [f"avg@{each.repeats} {each.avg_at_k:.4f}"]
        parts += [f"pass@{k} {value:.4f}" for k, value in each.pass_at_k.items() if k > 1]
        parts += [f"mean reward {each.mean_reward:.4f}", f"{each.prompt_count} prompts"]
        parts += [f"{key} {value:.4f}" for key, value in each.metrics.items()]
        missing = f", {each.missing_count} missing" if each.missing_count else ""
        data_set = each.data_set or "overall"
        typer.echo(f"{step}: {result.suite}/{data_set}: {', '.join(parts)}{missing}")
