"""Recovery: a hub begins a run, or goes on with the one in its folder."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog

from astraflow import __version__
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import RunId
from astraflow.core.run import Run
from astraflow.dataflow.memory import Memory
from astraflow.dataflow.recipe_settings import run_settings
from astraflow.dataflow.replica import Begin, Look, Replica
from astraflow.storage.fault_points import FaultPoint, reach
from astraflow.storage.journal import InMemoryJournal, Journal, Records
from astraflow.storage.sqlite import SqliteJournal
from astraflow.storage.sqlite_file import Durability
from astraflow.wire.journal import record_bytes
from astraflow.wire.journal_events import RunOpened

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_READ_COUNT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A run to go on with.

    Attributes:
        replica: Its state.
        journal: Open; None: the recipe wants none.
        is_restarted: Whether it began before this process.
    """

    replica: Replica
    journal: Journal | None
    is_restarted: bool


async def open_run(
    recipe: Recipe, run_dir: RunDir, *, size_of: Callable[[str], int], clock: Clock
) -> Recovered:
    """Begin the run of a folder, or bring it back to where its journal ends.

    Args:
        recipe: Resolved.
        run_dir: Folder of the run.
        size_of: Rows of a data set, by its name.
        clock: Tells when a run begins.

    Raises:
        AstraflowError: JOURNAL_FAILED when the journal is damaged, held by another hub, of another
            set-up or of another release, or cannot be written.
    """
    journal = _open_journal(recipe, run_dir)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(journal.close)
        reach(FaultPoint.RECOVERY_OPENED)
        started = time.monotonic()
        replica = await replay(journal, run_dir.snapshot, beginning_of(recipe))
        if replica is None:
            begun = await _begun(recipe, journal, size_of=size_of, clock=clock)
            undo.pop_all()
            return begun
        must_fit(recipe, replica.opened)
        reach(FaultPoint.RECOVERY_REPLAYED)
        undo.pop_all()
    took_s = round(time.monotonic() - started, 3)
    log.info("run goes on", run=replica.opened.run_id, records=replica.position, replay_s=took_s)
    return Recovered(replica=replica, journal=journal, is_restarted=True)


async def replay(
    journal: Records,
    snapshot: Path,
    begin: Begin,
    *,
    end: int | None = None,
    look: Look | None = None,
) -> Replica | None:
    """Return what a journal comes to; None: it is empty.

    Args:
        journal: What happened.
        snapshot: File of what happened before it.
        begin: Makes the run that the first record names.
        end: Position to stop at; None: the last record.
        look: Called with every event.

    Raises:
        AstraflowError: JOURNAL_FAILED; what `begin` raises.
    """
    end = journal.end if end is None else end
    replica = Replica.load(snapshot)
    if replica is None:
        if not end:
            return None
        replica = Replica.begin((await journal.read(0, limit=1))[0], begin)
    while replica.position < end:
        count = min(_READ_COUNT, end - replica.position)
        for record in await journal.read(replica.position, limit=count):
            replica.take(record, look)
    return replica


def beginning_of(recipe: Recipe) -> Begin:
    """Return what makes the run of a recipe, as it was when the run began."""

    def begin(opened: RunOpened, time: datetime) -> Run:
        must_fit(recipe, opened)
        sizes = opened.data_set_sizes
        settings = run_settings(recipe, run_id=RunId(opened.run_id), size_of=sizes.__getitem__)
        return Run(settings, start_time=time)

    return begin


def must_fit(recipe: Recipe, opened: RunOpened) -> None:
    """Refuse to go on with a run that was set up otherwise.

    Raises:
        AstraflowError: JOURNAL_FAILED.
    """
    if opened.settings_digest != settings_digest(recipe):
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"the journal is of run {opened.run_id}, which was set up otherwise: its recipe has "
            "other policies, data, workflows, rollouts, evals, seed or hub.session_ttl_s; go on "
            "with the recipe.yaml of the run's folder, or begin another run with another --run-dir",
        )


def settings_digest(recipe: Recipe) -> bytes:
    """Return 16 bytes over what the decisions of a run depend on."""
    parts = {"seed", "policies", "data", "workflows", "rollouts", "evals", "relation"}
    said = recipe.model_dump(mode="json", include=parts, exclude_defaults=True)
    for policy in said["policies"].values():
        policy.pop("model", None)
    said["session_ttl_s"] = recipe.hub.session_ttl_s
    text = json.dumps(said, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _open_journal(recipe: Recipe, run_dir: RunDir) -> Journal:
    settings = recipe.hub.journal
    if settings.kind == "none":
        return InMemoryJournal()
    return SqliteJournal.open(run_dir.journal, durability=Durability(settings.durability))


async def _begun(
    recipe: Recipe, journal: Journal, *, size_of: Callable[[str], int], clock: Clock
) -> Recovered:
    now = clock.now()
    opened = RunOpened(
        run_id=f"{recipe.name}-{now:%Y%m%d%H%M%S}",
        settings_digest=settings_digest(recipe),
        data_set_sizes={name: size_of(name) for name in recipe.data},
        software=__version__,
    )
    run = beginning_of(recipe)(opened, now)
    replica = Replica(opened, run, Memory(), position=1)
    if recipe.hub.journal.kind == "none":
        return Recovered(replica=replica, journal=None, is_restarted=False)
    await journal.append([record_bytes(opened, now)])
    return Recovered(replica=replica, journal=journal, is_restarted=False)
