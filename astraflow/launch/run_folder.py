"""The folder of a run: claimed for a fresh run, or taken up again where an earlier one died."""

import json
import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState
from astraflow.dataflow.journals import is_begun

_RAAS = "raas-"


def claim_run_dir(runs: Path, name: str) -> RunDir:
    """Make the run's folder; one that is there is moved aside, with its time in its name.

    Raises:
        AstraflowError: NAME_TAKEN when its hub still runs.
    """
    run_dir = RunDir(runs / name)
    if run_dir.root.exists():
        must_be_dead(run_dir, "give this one another name with --name")
        made = datetime.fromtimestamp(run_dir.root.stat().st_mtime).astimezone()
        shutil.move(run_dir.root, _free(runs, f"{name}.{made:%Y%m%d-%H%M%S}"))
    run_dir.root.mkdir(parents=True)
    return run_dir


def reopen_run(run_dir: RunDir) -> Recipe:
    """Return the recipe of a run that died, for it to go on.

    Raises:
        AstraflowError: NOT_READY when the folder has no recipe or no journal; NAME_TAKEN when
            the hub still runs; RUN_ENDED when the run reached its end; INVALID_FIELD for a recipe
            that this release cannot read.
    """
    if not run_dir.recipe.exists():
        raise _not_to_go_on(run_dir, "recipe", run_dir.recipe)
    recipe = load_recipe(run_dir.recipe, ())
    if not is_begun(recipe, run_dir):
        raise _not_to_go_on(run_dir, "journal", run_dir.journal)
    must_be_dead(run_dir, "look at it with `astraflow status`")
    _must_not_be_over(run_dir)
    return recipe


def _not_to_go_on(run_dir: RunDir, what: str, path: Path) -> AstraflowError:
    return AstraflowError(
        Reason.NOT_READY,
        f"{run_dir.root} has no {what} to go on with ({path} is missing); give the folder "
        "of a run that had hub.journal.kind sqlite or postgres, or start it anew with its recipe",
    )


def endpoint_before(run_dir: RunDir) -> HubEndpoint | None:
    """Return how the hub was reached that died here; members from elsewhere still try that."""
    with suppress(AstraflowError):
        return run_dir.read_endpoint()
    return None


def next_node_index(run_dir: RunDir) -> int:
    """Return the first number of a rollout node that this run has not used.

    The sessions of those before may not have ended yet, and their names are theirs.
    """
    used = [path.stem.removeprefix(_RAAS) for path in run_dir.log(_RAAS).parent.glob("raas-*.log")]
    return max((int(number) + 1 for number in used if number.isdecimal()), default=0)


def must_be_dead(run_dir: RunDir, otherwise: str) -> None:
    """Refuse a folder whose run is live.

    Args:
        run_dir: Of the run.
        otherwise: What else to do, for the message.

    Raises:
        AstraflowError: NAME_TAKEN.
    """
    endpoint = endpoint_before(run_dir)
    if endpoint is not None and psutil.pid_exists(endpoint.pid):
        raise AstraflowError(
            Reason.NAME_TAKEN,
            f"{run_dir.root} is a live run (hub process {endpoint.pid}); wait for it, stop it, or "
            f"{otherwise}",
        )


def _must_not_be_over(run_dir: RunDir) -> None:
    """Refuse a run that ended; a hub leaves its status, and one that died before has none yet."""
    if run_dir.status.exists():
        state = json.loads(run_dir.status.read_text())["state"]
        if RunState(state).is_final:
            raise AstraflowError(
                Reason.RUN_ENDED,
                f"{run_dir.root} is over ({state}); start its recipe anew, or see what came of it "
                f"with `astraflow ledger {run_dir.root}`",
            )


def _free(runs: Path, name: str) -> Path:
    taken = (runs / name, *(runs / f"{name}-{number}" for number in range(1, 1000)))
    return next(path for path in taken if not path.exists())


def must_have(run_dir: RunDir, checkpoint_id: str) -> None:
    """Refuse to go back to a checkpoint that the run does not have; empty: there is none to have.

    Raises:
        AstraflowError: CHECKPOINT_UNKNOWN, naming those it has.
    """
    path = run_dir.saved(checkpoint_id)
    if not checkpoint_id or path.exists():
        return
    known = ", ".join(sorted(each.stem for each in path.parent.glob("*.json"))) or "none"
    raise AstraflowError(
        Reason.CHECKPOINT_UNKNOWN,
        f"{run_dir.root} has no checkpoint '{checkpoint_id}'; those of `astraflow save` are: "
        f"{known}",
    )
