"""The folder of a run: claimed for a fresh run, or taken up again where an earlier one ended."""

import fcntl
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Final

import psutil
import structlog

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import HubEndpoint, RunDir, read_json
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState
from astraflow.dataflow.journals import is_begun
from astraflow.dataflow.recipe_settings import settings_digest
from astraflow.storage.lock import lock_beside

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_RAAS: Final = "raas-"
_CLOCK_SLACK_S: Final = 60.0


@contextmanager
def claimed_run_dir(runs: Path, name: str) -> Generator[RunDir]:
    """Make the run's folder, and keep others from it while entered.

    One that is there is moved aside, with its time in its name.

    Raises:
        AstraflowError: NAME_TAKEN when it is in use, or its hub still runs; INVALID_FIELD when
            there can be no such folder.
    """
    run_dir, otherwise = RunDir(runs / name), "give this one another name with --name"
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{runs} cannot be made ({error.strerror}); give --runs another"
        ) from error
    with ExitStack() as exits:
        # Of two that are started at once, the second finds what the first has made.
        with _locked(runs / ".lock", waits=True):
            if run_dir.root.exists():
                must_be_dead(run_dir, otherwise)
                made = datetime.fromtimestamp(run_dir.root.stat().st_mtime).astimezone()
                aside = f"{name}.{made:%Y%m%d-%H%M%S}"
                free = (runs / f"{aside}{end}" for end in ("", *(f"-{i}" for i in range(1, 1000))))
                with held_run_dir(run_dir, otherwise):
                    shutil.move(run_dir.root, next(each for each in free if not each.exists()))
            run_dir.root.mkdir()
            exits.enter_context(held_run_dir(run_dir, otherwise))
        yield run_dir


@contextmanager
def held_run_dir(run_dir: RunDir, otherwise: str) -> Generator[None]:
    """Keep others from a folder while entered; when this process dies it is free.

    Args:
        run_dir: Of the run.
        otherwise: What else to do, for the message.

    Raises:
        AstraflowError: NAME_TAKEN when another process has it.
    """
    with ExitStack() as exits:
        try:
            exits.enter_context(_locked(run_dir.lock, waits=False))
        except BlockingIOError:
            raise AstraflowError(
                Reason.NAME_TAKEN,
                f"another `astraflow run` is at work in {run_dir.root}; wait for it, stop it, or "
                f"{otherwise}",
            ) from None
        yield


@contextmanager
def _locked(path: Path, *, waits: bool) -> Generator[None]:
    """Hold a lock; a file system that has none is taken at its word.

    Raises:
        BlockingIOError: Another process has it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            log.warning("a folder of runs cannot be locked", path=str(path), why=str(error))
        yield


def reopened_recipe(run_dir: RunDir, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run, for it to go on.

    Args:
        run_dir: Of the run.
        overrides: What changes, each `a.b=value`.

    Raises:
        AstraflowError: NOT_READY when the folder has no recipe or no journal; NAME_TAKEN when
            the hub still runs; RUN_ENDED when every policy has done its steps; INVALID_FIELD for
            a recipe that this release cannot read, and what cannot change.
    """
    if not run_dir.recipe.exists():
        raise _not_to_go_on(run_dir, "recipe", run_dir.recipe)
    before = load_recipe(run_dir.recipe, ())
    if not is_begun(before, run_dir):
        raise _not_to_go_on(run_dir, "journal", run_dir.journal)
    must_be_dead(run_dir, "look at it with `astraflow status`")
    recipe = load_recipe(run_dir.recipe, overrides)
    if settings_digest(recipe) != settings_digest(before):
        alone = [load_recipe(run_dir.recipe, [each]) for each in overrides]
        fixed = [
            given
            for given, changed in zip(overrides, alone, strict=True)
            if settings_digest(changed) != settings_digest(before)
        ]
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"a run that goes on keeps what its hub has decided by: {', '.join(fixed)} cannot "
            "change; leave it out, or start another run from a checkpoint of this one "
            "(policies.NAME.model.path)",
        )
    _must_have_steps(run_dir, recipe)
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
    if endpoint is not None and is_live(run_dir):
        raise AstraflowError(
            Reason.NAME_TAKEN,
            f"{run_dir.root} is a live run (hub process {endpoint.pid}); wait for it, stop it, or "
            f"{otherwise}",
        )


def is_live(run_dir: RunDir) -> bool:
    """Whether the process of its hub lives, and not another that has its number by now."""
    endpoint = endpoint_before(run_dir)
    if endpoint is None:
        return False
    try:
        process = psutil.Process(endpoint.pid)
        start_time_s = process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:
            # It died with its launcher, and whoever is its parent now has not asked for its end.
            return False
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    is_same = abs(start_time_s - endpoint.start_time_s) < _CLOCK_SLACK_S
    # A clock that was set since moves what the system says of the start, as after a suspension.
    return is_same or not endpoint.start_time_s or _is_held(lock_beside(run_dir.journal))


def is_starting(run_dir: RunDir) -> bool:
    """Whether a launcher is at work in it and no hub of it has had an address yet."""
    return endpoint_before(run_dir) is None and _is_held(run_dir.lock)


def _is_held(lock: Path) -> bool:
    """Whether a process has a lock."""
    if not lock.exists():
        return False
    try:
        with _locked(lock, waits=False):
            return False
    except BlockingIOError:
        return True


def _must_have_steps(run_dir: RunDir, recipe: Recipe) -> None:
    """Refuse a run whose steps are done; a hub leaves its status, one that died has none yet."""
    status = read_json(run_dir.status)
    if not status:
        return
    done = {each["policy_id"]: each["step"] for each in status["policies"]}
    limits = {name: policy.trainer.step_count for name, policy in recipe.policies.items()}
    is_done = all(limit is not None and done.get(n, 0) >= limit for n, limit in limits.items())
    if RunState(status["state"]) is RunState.DONE and is_done:
        name, count = next(iter(done.items()))
        raise AstraflowError(
            Reason.RUN_ENDED,
            f"{run_dir.root} has done its {count} steps; go on with more of them (--set "
            f"policies.{name}.trainer.step_count={2 * count}), start its recipe anew, or see what "
            f"came of it with `astraflow ledger {quote(str(run_dir.root))}`",
        )


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
