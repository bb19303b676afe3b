"""Journals: where the records and the snapshot of a run lie, by hub.journal.kind."""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeVar

import structlog

from astraflow.config.extras import install
from astraflow.config.pool import JournalConfig
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.journal import InMemoryJournal, Journal
from astraflow.storage.snapshot import Snapshot, SnapshotFile
from astraflow.storage.sqlite import Durability, JournalReader, SqliteJournal

if TYPE_CHECKING:
    from astraflow.storage.postgres import Place, PostgresReader

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Opened = TypeVar("Opened", bound=Journal | None)

_POLL_S = 0.5

# For how long a hub that goes on waits for its database; then whoever started it decides.
_AWAY_S = 30.0


async def open_journal(recipe: Recipe, run_dir: RunDir) -> Journal:
    """Open the journal of a run for writing, or begin one.

    With a database, this waits while another hub may still have it: a standby for ever, others
    until that one shows that it lives. A hub that goes on waits for a database that is away, too.

    Raises:
        AstraflowError: JOURNAL_FAILED when it is damaged, held by another hub or cannot be
            written; CAPABILITY_MISSING without the extra `postgres`.
    """
    settings = recipe.hub.journal
    match settings.kind:
        case "none":
            return InMemoryJournal()
        case "postgres":
            is_begun_before = is_begun(recipe, run_dir)
            place = _place(settings, run_dir)
            return await _open_postgres(settings, place, waits_s=_AWAY_S if is_begun_before else 0)
        case "sqlite":
            if run_dir.snapshot.exists() and not run_dir.journal.exists():
                raise AstraflowError(
                    Reason.JOURNAL_FAILED,
                    f"{run_dir.journal} is missing, and the snapshot of its run is there; restore "
                    "the whole folder from one copy, or move it aside to begin the run anew from "
                    "the trainer's last checkpoint",
                )
            durability = Durability(settings.durability)
            # All of its pages are read, of gigabytes for seconds.
            return await _opened(
                partial(SqliteJournal.open, run_dir.journal, durability=durability)
            )


async def _opened(opens: Callable[[], Opened]) -> Opened:
    """Open a journal in a thread; one that nobody waits for any more is closed again."""
    opening = asyncio.ensure_future(asyncio.to_thread(opens))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(AstraflowError):
            journal = await opening
            if journal is not None:
                await journal.close()
        raise


async def _open_postgres(settings: JournalConfig, place: "Place", *, waits_s: float) -> Journal:
    from astraflow.storage.postgres import PostgresJournal  # noqa: PLC0415 - an extra of its own

    deadline_s = time.monotonic() + settings.lease_s + 2 * _POLL_S
    is_first = True
    away_until_s = time.monotonic() + waits_s
    while True:
        began_s = time.monotonic()
        try:
            journal = await _opened(
                partial(
                    PostgresJournal.open,
                    place,
                    durability=Durability(settings.durability),
                    lease_s=settings.lease_s,
                )
            )
        except AstraflowError as error:
            if not error.retryable or time.monotonic() > away_until_s:
                raise
            log.warning("the database is away; waiting", why=error.message)
            await asyncio.sleep(_POLL_S)
            deadline_s = time.monotonic() + settings.lease_s + 2 * _POLL_S
            continue
        if journal is not None:
            return journal
        if settings.standby:
            away_until_s = inf
        # One try begins when the lease of a hub that is gone is over, however long tries take.
        if not settings.standby and began_s > deadline_s:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"another hub serves the run of {place}; stop it first, or start this one with "
                "--standby, to go on when that one is gone",
            )
        if is_first:
            log.info("another hub has the journal; waiting", place=str(place))
        is_first = False
        await asyncio.sleep(_POLL_S)


@contextmanager
def open_reader(
    recipe: Recipe, run_dir: RunDir
) -> Generator["tuple[JournalReader | PostgresReader, Snapshot]"]:
    """Yield the records that a run's journal has now, and its snapshot.

    Raises:
        AstraflowError: JOURNAL_FAILED when there is none; CAPABILITY_MISSING.
    """
    settings = recipe.hub.journal
    if settings.kind == "postgres":
        place = _place(settings, run_dir)
        from astraflow.storage.postgres import PostgresReader  # noqa: PLC0415

        reader = PostgresReader(place)
    else:
        reader = JournalReader(run_dir.journal)
    try:
        yield reader, snapshot_of(recipe, run_dir)
    finally:
        reader.close()


def snapshot_of(recipe: Recipe, run_dir: RunDir) -> Snapshot:
    """Return the snapshot that belongs to a run's journal.

    Raises:
        AstraflowError: CAPABILITY_MISSING without the extra `postgres`.
    """
    settings = recipe.hub.journal
    if settings.kind != "postgres":
        return SnapshotFile(run_dir.snapshot)
    place = _place(settings, run_dir)
    from astraflow.storage.postgres import PostgresSnapshot  # noqa: PLC0415

    return PostgresSnapshot(place)


def is_begun(recipe: Recipe, run_dir: RunDir) -> bool:
    """Whether a hub of this folder has a journal to go on with, as far as the folder shows."""
    if recipe.hub.journal.kind == "postgres":
        return run_dir.recipe.exists()
    return run_dir.journal.exists()


def _place(settings: JournalConfig, run_dir: RunDir) -> "Place":
    try:
        from astraflow.storage.postgres import Place  # noqa: PLC0415
    except ImportError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"hub.journal.kind postgres needs {error.name}: {install('postgres')}",
        ) from error
    schema = settings.schema_name or run_dir.root.resolve().name
    return Place(url=settings.url or "", schema=schema)
