"""Compaction: a snapshot takes the place of old records, written by a fork of the hub.

A fork has the state of that moment, whatever the hub decides meanwhile. It takes what the hub has
not carried out yet into account, and puts the snapshot in its place once the journal holds all that
is in it. So it takes no more than to write the state down, however many records came to it.
"""

import asyncio
import gc
import os
import signal
import traceback
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Self

import structlog

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.journals import is_begun, open_journal, open_reader, snapshot_of
from astraflow.dataflow.recovery import Replica, beginning_of, catch_up, replica_of
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.storage.journal import Journal
from astraflow.storage.lock import FileLock
from astraflow.wire.journal import RunOpened

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_POLL_S: Final = 0.5

_ERROR_NBYTES: Final = 4000

# A snapshot is begun when to decide what came since the last one took so long; to replay that takes
# a quarter longer. With what comes while it is made, and with the start of a process, a hub serves
# again within five seconds, also where other programs have half of its core.
_REPLAY_S: Final = 0.6

# Gigabytes take a minute; who takes longer waits for what never comes.
_LIMIT_S: Final = 600.0

# Members wait for the hub, and nobody for a snapshot; yet what comes meanwhile has to be replayed,
# too: on a core that has no rest a snapshot gets a quarter of it.
_NICE: Final = 5


async def write_snapshot_of(run_dir: RunDir, end: int) -> None:
    """Write the state that the records before position `end` come to.

    Raises:
        AstraflowError: JOURNAL_FAILED, also while another process writes one.
    """
    recipe = load_recipe(run_dir.recipe, ())
    with _alone(run_dir), open_reader(recipe, run_dir) as (reader, snapshot):
        replica = await replica_of(reader, snapshot, beginning_of(recipe))
        if replica is not None:
            await catch_up(replica, reader, end=end)
            snapshot.write(replica.dump(), identity=reader.identity, position=end)


async def compact(run_dir: RunDir) -> int:
    """Write the snapshot of a whole journal, for another release to go on from; return its end.

    Raises:
        AstraflowError: JOURNAL_FAILED when a hub has the journal, it is damaged, or this code
            decides otherwise than it says; NOT_READY when there is none.
    """
    if not run_dir.recipe.exists():
        raise AstraflowError(Reason.NOT_READY, f"{run_dir.recipe} does not exist")
    recipe = load_recipe(run_dir.recipe, ())
    if not is_begun(recipe, run_dir):
        raise AstraflowError(Reason.NOT_READY, f"{run_dir.journal} does not exist")
    journal = await open_journal(recipe, run_dir)
    try:
        await write_snapshot_of(run_dir, journal.end)
        return journal.end
    finally:
        await journal.close()


@contextmanager
def _alone(run_dir: RunDir) -> Generator[None]:
    # One at a time, also when a hub that died left one behind: positions only rise.
    lock = FileLock.take(run_dir.snapshot.with_suffix(".lock"))
    try:
        yield
    finally:
        lock.release()


class Compaction:
    """Keeps the journal of a hub small."""

    def __init__(self, hub: Hub, journal: Journal, *, opened: RunOpened, run_dir: RunDir) -> None:
        self._hub = hub
        self._journal = journal
        self._opened = opened
        self._run_dir = run_dir
        self._recipe = load_recipe(run_dir.recipe, ())
        self._took_s = 0.0

    async def run(self) -> None:
        """Let a snapshot take the place of records whenever enough of them have come, for ever.

        A snapshot that fails costs nothing but room: the next attempt comes after as many again.

        Raises:
            AstraflowError: JOURNAL_FAILED when the journal cannot be trimmed.
        """
        commits, every_nbytes = self._hub.commits, self._recipe.hub.journal.compact_nbytes
        done_nbytes, done_s = 0, 0.0
        while True:
            await asyncio.sleep(_POLL_S)
            # A state that takes long to write is written the less often.
            least_s = max(_REPLAY_S, self._took_s)
            came_nbytes, came_s = commits.nbytes - done_nbytes, self._hub.replay_s - done_s
            is_due = came_nbytes >= every_nbytes or came_s >= least_s
            # What a run holds that failed to decide is not what its journal comes to.
            if not is_due or self._hub.is_broken:
                continue
            done_nbytes, done_s = commits.nbytes, self._hub.replay_s
            end = await self.write()
            if end is not None:
                hit(FaultPoint.TRIM_STARTED)
                # As much will come again: pages would be moved about for nothing.
                await self._journal.trim(end, spare_nbytes=every_nbytes)
                log.info("journal compacted", first=self._journal.first, end=end)

    async def write(self) -> int | None:
        """Have a snapshot of this moment written; return its position, None when that failed."""
        commits = self._hub.commits
        position, ticket = commits.position, commits.ticket
        why = f"it took more than {_LIMIT_S:.0f} s"
        try:
            async with (
                asyncio.timeout(_LIMIT_S),
                _Fork.begin(partial(self._write_here, position)) as fork,
            ):
                if await fork.is_ready():
                    await commits.passed(ticket)
                    fork.go()
                why = await fork.end()
                self._took_s = fork.cpu_s
        except TimeoutError:
            pass
        except OSError as error:
            why = f"the hub cannot be forked: {error}"
        if why is not None:
            log.warning("journal: no snapshot; it keeps growing", why=why)
        return position if why is None else None

    def _write_here(self, position: int, may_go: Callable[[], bool]) -> None:
        """Write the state of this process, which is a fork of the hub's."""
        hub = self._hub
        with _alone(self._run_dir):
            for decided in hub.commits.pending:
                hub.directory.follow(decided.event, decided.answer, decided.effects, decided.time)
            data = Replica(self._opened, hub.run, hub.directory, position=position).dump()
            hit(FaultPoint.SNAPSHOT_DUMPED)
            if may_go():
                snapshot = snapshot_of(self._recipe, self._run_dir)
                snapshot.write(data, identity=self._journal.identity, position=position)
                hit(FaultPoint.SNAPSHOT_PLACED)


class _Fork:
    """A copy of this process that does one thing in two steps.

    It has this thread alone and no file of the other one: what it does must need no thread, no
    socket and no lock that another thread may have had.

    Attributes:
        cpu_s: What it took, once it has ended.
    """

    def __init__(self, pid: int, answers: asyncio.StreamReader, orders: int) -> None:
        self.cpu_s = 0.0
        self._pid = pid
        self._is_over = False
        self._answers = answers
        self._orders = orders

    @classmethod
    @asynccontextmanager
    async def begin(cls, work: Callable[[Callable[[], bool]], None]) -> AsyncGenerator[Self]:
        """Begin work in a copy that ends at the end of the context, if it has not yet.

        Args:
            work: Gets a call that returns whether to take the second step.
        """
        answers, answer = os.pipe()
        order, orders = os.pipe()
        with (
            os.fdopen(answers, "rb", buffering=0) as read,
            os.fdopen(orders, "wb", buffering=0) as write,
        ):
            try:
                with warnings.catch_warnings():
                    # Of other threads, which the copy does without.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if not pid:
                    _work_and_exit(work, answer, order)
            finally:
                os.close(answer)
                os.close(order)
            fork = cls(pid, asyncio.StreamReader(), write.fileno())
            try:
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(fork._answers), read
                )
                with closing(transport):
                    yield fork
            finally:
                fork._kill()

    async def is_ready(self) -> bool:
        """Wait for the first step; return whether it is done."""
        return await self._answers.read(1) == _DONE

    def go(self) -> None:
        """Have the second step done."""
        with suppress(BrokenPipeError):
            os.write(self._orders, _DONE)

    async def end(self) -> str | None:
        """Wait for the end; return why it failed, None: it did not."""
        why = (await self._answers.read()).decode(errors="replace").removeprefix(_FAILED)
        _, status, used = await asyncio.to_thread(os.wait4, self._pid, 0)
        self._is_over, self.cpu_s = True, used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        return why or f"exit code {code}" if code else None

    def _kill(self) -> None:
        if not self._is_over:
            # Whoever waited for it may have been just in time.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


_DONE: Final = b"\n"
_FAILED: Final = "!"
_STDERR: Final = 2


def _work_and_exit(work: Callable[[Callable[[], bool]], None], answer: int, order: int) -> NoReturn:
    code = 1
    try:
        # What garbage there is dies with this process.
        gc.disable()
        os.nice(_NICE)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        _close_all_but(answer, order)

        def may_go() -> bool:
            os.write(answer, _DONE)
            return os.read(order, 1) == _DONE

        work(may_go)
        code = 0
    except BaseException as error:  # noqa: BLE001 - said where the hub reads it
        why = error.message if isinstance(error, AstraflowError) else traceback.format_exc()
        with suppress(OSError):
            os.write(answer, _FAILED.encode() + why.encode()[-_ERROR_NBYTES:])
    finally:
        os._exit(code)


def _close_all_but(*kept: int) -> None:
    """Let go of the locks and ports of the process that this one is a fork of."""
    for each in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if each > _STDERR and each not in kept:
            # The list has one of its own, which is closed.
            with suppress(OSError):
                os.close(each)
