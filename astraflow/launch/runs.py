"""The runs in a folder: which there are, what came of each, how they differ, what they logged."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import structlog
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import GrowingLines, RunDir, read_json
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import StopMode
from astraflow.launch.run_folder import endpoint_before, is_live, is_starting
from astraflow.launch.summary import RunSummary, summarise

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOOK_S: Final = 0.2
_DIED: Final = "died"
UNREADABLE: Final = "unreadable"
_OF_THE_FOLDER: Final = {"name", "tracing.path"}


def list_runs(runs: Path) -> list[dict[str, Any]]:
    """Return what is known of every run in a folder, the newest last; for machines as for people.

    Raises:
        AstraflowError: NOT_READY when there is no such folder.
    """
    if not runs.is_dir():
        raise AstraflowError(
            Reason.NOT_READY, f"there is no folder {runs}; no run was started here"
        )
    found = [RunDir(path.parent) for path in runs.glob("*/recipe.yaml")]
    rows: list[dict[str, Any]] = []
    for each in found:
        try:
            rows.append(row_of(each))
        except Exception as error:  # noqa: BLE001 - one that is damaged hides no other
            log.warning("a run cannot be read", run=str(each.root), why=str(error))
            rows.append(_row(each, state=UNREADABLE, failure=str(error)))
    return sorted(rows, key=lambda row: row["time"])


def row_of(run_dir: RunDir) -> dict[str, Any]:
    """Return what is known of one run.

    Raises:
        AstraflowError: NOT_READY when it is no folder of a run.
    """
    summary = summary_of(run_dir)
    policies = summary.policies.values()
    return _row(
        run_dir,
        state=summary.state,
        failure=summary.failure,
        steps=max((each.steps for each in policies), default=0),
        reward_first=next((each.reward_first for each in policies), None),
        reward_last=next((each.reward_last for each in policies), None),
        accuracy=summary.accuracy_after,
        tokens_per_s=summary.tokens_per_s,
        wall_s=summary.wall_s,
    )


def _row(run_dir: RunDir, **known: Any) -> dict[str, Any]:
    changed = max(path.stat().st_mtime for path in run_dir.root.iterdir())
    return {
        "name": run_dir.root.name,
        "steps": 0,
        "reward_first": None,
        "reward_last": None,
        "accuracy": None,
        "tokens_per_s": 0.0,
        "wall_s": 0.0,
        "time": datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds"),
        **known,
    }


def summary_of(run_dir: RunDir) -> RunSummary:
    """Return what came of a run so far, read from its files.

    Its state is starting until its hub serves, live while that does, and died where nothing says
    how it ended.

    Raises:
        AstraflowError: NOT_READY when it is no folder of a run.
    """
    if not run_dir.recipe.exists():
        raise AstraflowError(
            Reason.NOT_READY,
            f"{run_dir.root} is no folder of a run; `astraflow ls` lists those in runs",
        )
    written, recipe = read_json(run_dir.summary), _recipe(run_dir)
    if is_live(run_dir):
        state, failure = "live", None
    elif is_starting(run_dir):
        state, failure = "starting", None
    elif endpoint_before(run_dir) is not None:
        # What its hub left when it was killed. A summary is that of the part before.
        state, failure = _DIED, None
    else:
        state, failure = written.get("state", _DIED), written.get("failure")
    return summarise(
        run_dir,
        name=run_dir.root.name,
        seed=recipe.get("seed", 0),
        state=state,
        wall_s=written.get("wall_s", 0.0),
        failure=failure,
    )


def show_runs(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print runs, one in a line."""
    table = Table("run", "state", "steps", "reward", "accuracy", "tokens/s", "changed (UTC)")
    for row in rows:
        first, last = row["reward_first"], row["reward_last"]
        table.add_row(
            escape(row["name"]),
            row["state"],
            f"{row['steps']:,}",
            "-" if first is None else f"{first:.3g} → {last:.3g}",
            "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            row["time"][:16].replace("T", " "),
        )
    console.print(table)


def differences(runs: Sequence[RunDir]) -> dict[str, list[Any]]:
    """Return the keys in which the recipes of runs differ, with the value of each run."""
    flat = [dict(_flat(_recipe(each))) for each in runs]
    keys = sorted({key for each in flat for key in each} - _OF_THE_FOLDER)
    values = {key: [each.get(key) for each in flat] for key in keys}
    return {
        key: each for key, each in values.items() if any(other != each[0] for other in each[1:])
    }


def _recipe(run_dir: RunDir) -> dict[str, Any]:
    return yaml.safe_load(run_dir.recipe.read_text())


def _flat(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in cast("dict[str, Any]", tree).items():
            yield from _flat(value, f"{place}.{key}" if place else key)
    else:
        yield place, tree


def show_differences(console: Console, runs: Sequence[RunDir], changed: Mapping[str, Any]) -> None:
    """Print in which keys the recipes of runs differ."""
    table = Table()
    for name in ("key", *(each.root.name for each in runs)):
        table.add_column(escape(name), overflow="fold")
    for key, values in changed.items():
        table.add_row(key, *("-" if each is None else escape(str(each)) for each in values))
    console.print(table if changed else "their recipes are the same")


def log_lines(run_dir: RunDir, role: str | None, *, count: int, is_followed: bool) -> Iterator[str]:
    """Yield the last lines of the logs of a run, and what is written to them from then on.

    Args:
        run_dir: Of the run.
        role: Such as hub, trainer-solver or raas-0; None: all of them.
        count: Lines of each to begin with.
        is_followed: Go on while the run is live.

    Raises:
        AstraflowError: NOT_READY when there is no such log, naming those there are.
    """
    folder = run_dir.log("").parent
    known = sorted(path.stem for path in folder.glob("*.log"))
    if not known or (role is not None and role not in known):
        whose, those = role or "any role", ", ".join(known) or "none"
        raise AstraflowError(
            Reason.NOT_READY, f"{run_dir.root} has no log of {whose}; known: {those}"
        )
    logs: dict[Path, GrowingLines] = {}
    while True:
        was_live = is_live(run_dir)
        for path in sorted(folder.glob(f"{role or '*'}.log")):
            mark = "" if role else f"{path.stem}: "
            # All of a log of days is more than what is shown, and more than memory has.
            most = None if path in logs else count
            new = logs.setdefault(path, GrowingLines(path)).new()
            for _, line in deque(new, maxlen=most):
                said = line.decode(errors="replace").splitlines()
                yield from (mark + each for each in said)
        if not is_followed or not was_live:
            return
        time.sleep(_LOOK_S)


async def stop_run(run_dir: RunDir, *, is_now: bool) -> None:
    """Have the hub of a run drain it, or cancel it; return once it is over.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    async with ControlClient.of(run_dir) as control:
        await control.stop_run(StopMode.CANCEL if is_now else StopMode.DRAIN)
        async for status in control.watch_run():
            if status.state.is_final:
                return
