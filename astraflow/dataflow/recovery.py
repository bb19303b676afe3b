"""Recovery: a hub begins a run, or goes on with what the journal in its folder comes to."""

import asyncio
import gc
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime

import structlog

from astraflow import __version__
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock
from astraflow.core.code import see_working_directory
from astraflow.core.effects import Decision, EvalChanged, RecordBatch, RunSaved
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import Event, HubRestarted
from astraflow.core.ids import RunId
from astraflow.core.run import Run
from astraflow.dataflow.journals import open_journal, snapshot_of
from astraflow.dataflow.members import MemberDirectory
from astraflow.dataflow.recipe_settings import run_settings, settings_digest
from astraflow.dataflow.recorder import Line
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.storage.journal import Journal, JournalRecords
from astraflow.storage.snapshot import Snapshot
from astraflow.wire.journal import RunOpened, read_record, record_bytes
from astraflow.wire.snapshot import dump_state, load_state

# Whose objects a snapshot holds.
_MODULES = (
    "astraflow.core.",
    "astraflow.dataflow.members:",
    "astraflow.rpc.access:",
    "astraflow.wire.journal:RunOpened",
)

Begin = Callable[[RunOpened, datetime], Run]

Observer = Callable[[Event, Decision], None]

OnProgress = Callable[[float], None]

OnOpened = Callable[[Journal], Awaitable[None]]


class Replica:
    """Follows the records of one run.

    Attributes:
        directory: What is known of its members.
        position: Of the next record.
        software: Release that wrote the records up to there.
        lines: What people were to be told in metrics, evaluations and checkpoints.
    """

    def __init__(
        self, opened: RunOpened, run: Run, directory: MemberDirectory, *, position: int
    ) -> None:
        self.opened = opened
        self.run = run
        self.directory = directory
        self.position = position
        self.software = opened.software
        self.lines: list[tuple[Line, datetime]] = []

    @classmethod
    def load(cls, snapshot: Snapshot, *, identity: bytes = b"") -> "Replica | None":
        """Return the replica of a snapshot; None: there is none.

        Raises:
            AstraflowError: JOURNAL_FAILED when it is damaged, or of another release or journal.
        """
        data = snapshot.read(identity=identity)
        if data is None:
            return None
        # Algorithms of the user's own may lie beside them.
        see_working_directory()
        (opened, run, directory), position = load_state(data, modules=_MODULES)
        return cls(opened, run, directory, position=position)

    @classmethod
    def begin(cls, record: bytes, begin: Begin) -> "Replica":
        """Return the replica of a journal's first record.

        Raises:
            AstraflowError: JOURNAL_FAILED when it is no first record; what `begin` raises.
        """
        recorded = read_record(record)
        opened = recorded.entry
        if not isinstance(opened, RunOpened):
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                "the journal does not begin with its run, and its snapshot is missing; restore the "
                "whole folder from a copy",
            )
        return cls(opened, begin(opened, recorded.time), MemberDirectory(), position=1)

    def dump(self) -> bytes:
        """Return what a snapshot holds.

        Raises:
            AstraflowError: JOURNAL_FAILED when something in it has no plain value.
        """
        whole = (self.opened, self.run, self.directory)
        return dump_state(whole, position=self.position, modules=_MODULES)

    def take(self, record: bytes, observe: Observer | None = None) -> None:
        """Let happen what the next record says.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be, which is another release's journal.
        """
        recorded = read_record(record)
        event, time = recorded.entry, recorded.time
        if isinstance(event, RunOpened):
            raise self._refusal("a second run begins")
        if isinstance(event, HubRestarted):
            self.software = event.software or self.software
        try:
            decision = self.run.apply(event, time, goes_on=recorded.goes_on)
        except AstraflowError as error:
            raise self._refusal(error.message) from error
        except Exception as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        if recorded.decision not in (None, decision.digest):
            raise self._refusal("something else is decided here than was then")
        self.directory.follow(event, decision.answer, decision.effects, time)
        for effect in decision.effects:
            if isinstance(effect, RecordBatch | RunSaved) or (
                isinstance(effect, EvalChanged) and effect.eval_run.state.is_final
            ):
                self.lines.append((effect, time))
        self.position += 1
        if observe is not None:
            observe(event, decision)

    def _refusal(self, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.JOURNAL_FAILED,
            f"record {self.position} of the journal does not follow from those before it ({why}); "
            f"open it with release {self.software}, which wrote it, and with the code of the "
            "recipe's algorithms that it was written with; `astraflow dataflow compact` of that "
            "release makes a snapshot that a later one goes on from",
            metadata={"position": str(self.position)},
        )


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Applying so many takes some ms of the event loop, which answers that the hub recovers.
_READ_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A run to go on with.

    Attributes:
        journal: Open; None: the recipe wants none.
        is_restarted: Whether it began before this process.
        replay_s: CPU seconds that the journal took since its snapshot.
    """

    replica: Replica
    journal: Journal | None
    is_restarted: bool
    replay_s: float = 0.0


async def open_run(
    recipe: Recipe,
    run_dir: RunDir,
    *,
    size_of: Callable[[str], int],
    clock: Clock,
    on_opened: OnOpened | None = None,
    on_progress: OnProgress | None = None,
) -> Recovered:
    """Begin the run of a folder, or bring it back to where its journal ends.

    Raises:
        AstraflowError: JOURNAL_FAILED when the journal is damaged, held by another hub, of another
            set-up or of another release, or cannot be written.
    """
    journal = await open_journal(recipe, run_dir)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(journal.close)
        if on_opened is not None:
            await on_opened(journal)
        hit(FaultPoint.RECOVERY_OPENED)
        started, cpu_started = time.monotonic(), time.thread_time()
        # Nothing that is made here is garbage: to look for it takes a third of the time.
        gc.disable()
        try:
            snapshot = snapshot_of(recipe, run_dir)
            replica = await replay(journal, snapshot, beginning_of(recipe), on_progress=on_progress)
        finally:
            gc.enable()
        if replica is None:
            begun = await _begun(recipe, journal, size_of=size_of, clock=clock)
            undo.pop_all()
            return begun
        must_fit(recipe, replica.opened)
        hit(FaultPoint.RECOVERY_REPLAYED)
        undo.pop_all()
    took_s = round(time.monotonic() - started, 3)
    log.info("run goes on", run=replica.opened.run_id, records=replica.position, replay_s=took_s)
    return Recovered(
        replica=replica,
        journal=journal,
        is_restarted=True,
        replay_s=time.thread_time() - cpu_started,
    )


async def replay(
    journal: JournalRecords,
    snapshot: Snapshot,
    begin: Begin,
    *,
    observe: Observer | None = None,
    on_progress: OnProgress | None = None,
) -> Replica | None:
    """Return what a journal comes to; None: it is empty.

    Raises:
        AstraflowError: JOURNAL_FAILED; what `begin` raises.
    """
    replica = await replica_of(journal, snapshot, begin)
    if replica is not None:
        await catch_up(replica, journal, observe=observe, on_progress=on_progress)
    return replica


async def replica_of(journal: JournalRecords, snapshot: Snapshot, begin: Begin) -> Replica | None:
    """Return what a snapshot, or the first record of a journal, comes to; None: neither is there.

    Raises:
        AstraflowError: JOURNAL_FAILED; what `begin` raises.
    """
    replica = await asyncio.to_thread(Replica.load, snapshot, identity=journal.identity)
    if replica is not None and replica.position > journal.end:
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"{snapshot} goes to record {replica.position}, and the journal beside it ends at "
            f"{journal.end}: one of them is an older copy, or the journal was removed; restore the "
            "whole folder from one copy, or move it aside to begin the run anew from the trainer's "
            "last checkpoint",
        )
    if replica is None and journal.end:
        replica = Replica.begin((await journal.read(0, limit=1))[0], begin)
    return replica


async def catch_up(
    replica: Replica,
    journal: JournalRecords,
    *,
    end: int | None = None,
    observe: Observer | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Let happen what a journal says since.

    Raises:
        AstraflowError: JOURNAL_FAILED.
    """
    end, start = journal.end if end is None else end, replica.position
    if end > journal.end:
        raise AstraflowError(Reason.JOURNAL_FAILED, f"the journal has no record {end - 1}")
    reading = asyncio.ensure_future(_read(journal, start, end))
    try:
        while replica.position < end:
            records = await reading
            # The next ones are read while these are applied.
            reading = asyncio.ensure_future(_read(journal, replica.position + len(records), end))
            for record in records:
                replica.take(record, observe)
            if on_progress is not None:
                on_progress((replica.position - start) / (end - start))
            # Others of the event loop have their turn.
            await asyncio.sleep(0)
    finally:
        reading.cancel()


async def _read(journal: JournalRecords, start: int, end: int) -> Sequence[bytes]:
    return await journal.read(start, limit=min(_READ_COUNT, end - start)) if start < end else ()


def beginning_of(recipe: Recipe) -> Begin:
    """Return what makes the run of a recipe, as it was when the run began."""

    def begin(opened: RunOpened, time: datetime) -> Run:
        must_fit(recipe, opened)
        sizes = opened.data_set_sizes
        settings = run_settings(recipe, run_id=RunId(opened.run_id), size_of=sizes.__getitem__)
        counts = opened.step_counts
        if counts:
            # The recipe may have others by now: they count from a HubRestarted on.
            policies = tuple(
                replace(each, step_count=counts[each.policy_id] or None)
                for each in settings.policies
            )
            settings = replace(settings, policies=policies)
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
            "other data, workflows, rollouts, evals, seed, hub.session_ttl_s, or keys of its "
            "policies that the hub decides by; go on with the recipe.yaml of the run's folder, or "
            "begin another run with another --run-dir",
        )


def step_counts(recipe: Recipe) -> dict[str, int]:
    """Return on how many batches each policy trains; 0: until the data ends."""
    return {name: each.trainer.step_count or 0 for name, each in recipe.policies.items()}


async def _begun(
    recipe: Recipe, journal: Journal, *, size_of: Callable[[str], int], clock: Clock
) -> Recovered:
    now = clock.now()
    opened = RunOpened(
        # Runs of a sweep begin in one second, and share stores.
        run_id=f"{recipe.name}-{now:%Y%m%d%H%M%S}-{secrets.token_hex(3)}",
        settings_digest=settings_digest(recipe),
        data_set_sizes={name: size_of(name) for name in recipe.data},
        software=__version__,
        step_counts=step_counts(recipe),
    )
    run = beginning_of(recipe)(opened, now)
    replica = Replica(opened, run, MemberDirectory(), position=1)
    await journal.append([record_bytes(opened, now)])
    kept = None if recipe.hub.journal.kind == "none" else journal
    return Recovered(replica=replica, journal=kept, is_restarted=False)
