"""Compaction: a snapshot takes the place of old records, made by a process beside the hub.

That process, `python -m astraflow.dataflow.compaction RUN_DIR`, reads how far to go from its input,
replays the records up to there, writes a snapshot and says so; then it goes on from where it is. It
replays as many records as the hub took, so it may need as much of a core. Where the hub needs its
core itself it comes last, until the journal has grown too far meanwhile.
"""

import asyncio
import os
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import structlog

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.commits import Commits
from astraflow.dataflow.journals import is_begun, open_journal, open_reader
from astraflow.dataflow.recovery import Replica, beginning_of, catch_up, replica_of
from astraflow.rpc.concurrency import either
from astraflow.storage.fault_points import FaultPoint, arm, hit
from astraflow.storage.journal import Journal
from astraflow.storage.lock import FileLock
from astraflow.telemetry.garbage import collect_rarely, reuse_memory

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

POLL_S = 0.5
# Without anything to do the process ends after so many looks.
_IDLE_COUNT = 120

_ERROR_NBYTES = 1000

# How far the process stands back at first, on the scale of `nice`.
_IDLE = 19
# A snapshot is begun when to replay what came since the last one takes so long: with what comes
# while it is made, and with the start of a process, a hub serves again within five seconds.
REPLAY_S = 1.0


class SnapshotWriter:
    """Writes snapshots of a run whose journal grows meanwhile."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._recipe = load_recipe(run_dir.recipe, ())
        self._replica: Replica | None = None

    async def write(self, end: int) -> None:
        """Write the state that the records before position `end` come to.

        Raises:
            AstraflowError: JOURNAL_FAILED.
        """
        with open_reader(self._recipe, self._run_dir) as (reader, snapshot):
            if self._replica is None:
                self._replica = await replica_of(reader, snapshot, beginning_of(self._recipe))
            if self._replica is not None:
                await catch_up(self._replica, reader, end=end)
                # The hub has told people.
                self._replica.lines.clear()
                hit(FaultPoint.COMPACTION_REPLAYED)
                self._replica.save(snapshot, identity=reader.identity)
                hit(FaultPoint.SNAPSHOT_PLACED)


async def write_snapshot_of(run_dir: RunDir, end: int) -> None:
    """Write the state that the records before position `end` come to.

    Raises:
        AstraflowError: JOURNAL_FAILED, also while another process writes one.
    """
    with _writing(run_dir) as writer:
        await writer.write(end)


@contextmanager
def _writing(run_dir: RunDir) -> Generator[SnapshotWriter]:
    # One at a time, also when a hub that died left one behind: positions only rise.
    lock = FileLock.take(run_dir.snapshot.with_suffix(".lock"))
    try:
        yield SnapshotWriter(run_dir)
    finally:
        lock.release()


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


async def compact_for_ever(
    commits: Commits,
    journal: Journal,
    *,
    run_dir: Path,
    every_nbytes: int,
    replay_s: Callable[[], float],
) -> None:
    """Let a snapshot take the place of records whenever enough of them have come.

    A snapshot that fails costs nothing but room: the next attempt comes after as many again.

    Args:
        commits: Counts the bytes that come.
        journal: Trimmed.
        run_dir: Folder of the run.
        every_nbytes: So many bytes are enough.
        replay_s: Returns the CPU seconds that a replay takes of all that came: those since the
            snapshot that was found, and those that come. REPLAY_S of them are enough, too.

    Raises:
        AstraflowError: JOURNAL_FAILED when the journal cannot be trimmed.
    """
    done, idle_count = 0.0, 0

    def amount() -> float:
        return max(commits.nbytes / every_nbytes, replay_s() / REPLAY_S)

    process = SnapshotProcess(run_dir)
    try:
        while True:
            await asyncio.sleep(POLL_S)
            if amount() - done < 1.0:
                idle_count += 1
                if idle_count == _IDLE_COUNT:
                    await process.stop()
                continue
            done, idle_count = amount(), 0
            end = await _snapshot(process, journal, amount)
            if end is not None:
                hit(FaultPoint.TRIM_STARTED)
                # As much will come again: pages would be moved about for nothing.
                await journal.trim(end, spare_nbytes=every_nbytes)
                log.info("journal compacted", first=journal.first, end=journal.end)
    finally:
        await process.stop()


async def _snapshot(
    process: "SnapshotProcess", journal: Journal, amount: Callable[[], float]
) -> int | None:
    """Have a snapshot made; return the position that it goes to, None when it failed."""
    end, limit = journal.end, amount() + 1.0
    if await process.write(end, is_late=lambda: process.nice > 0 and amount() > limit):
        return end
    if not process.nice:
        return None
    log.info("journal: the snapshot finds no core; the next one stands back less")
    await process.stop(nice=0)
    end = journal.end
    return end if await process.write(end) else None


class SnapshotProcess:
    """The process beside the hub; it is started when it is needed.

    Attributes:
        nice: How far it stands back.
    """

    def __init__(self, run_dir: Path) -> None:
        self.nice = _IDLE
        self._run_dir = run_dir
        self._process: Process | None = None

    async def write(self, end: int, *, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Have a snapshot written; return whether it was.

        Args:
            end: Position that it goes to.
            is_late: Asked now and then; once it is, nobody waits any more.
        """
        process = self._process = self._process or await self._start()
        asked, answers = cast("StreamWriter", process.stdin), cast("StreamReader", process.stdout)
        with suppress(ConnectionError):
            asked.write(f"{end}\n".encode())
            await asked.drain()
        answer = asyncio.ensure_future(answers.readline())
        try:
            while not answer.done():
                if is_late():
                    return False
                await asyncio.wait([answer], timeout=POLL_S)
        finally:
            answer.cancel()
        if await answer:
            return True
        await self._complain(process)
        return False

    async def stop(self, *, nice: int = _IDLE) -> None:
        """End it; the next one stands back so far."""
        self.nice, process, self._process = nice, self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "astraflow.dataflow.compaction", str(self._run_dir)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        # From here, since its imports alone would keep the hub from its core for half a second.
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, self.nice)
            if self.nice == _IDLE and hasattr(os, "SCHED_IDLE"):
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return process

    async def _complain(self, process: Process) -> None:
        _, errors = await process.communicate()
        why = errors.decode(errors="replace")[-_ERROR_NBYTES:]
        log.warning("journal: no snapshot; it keeps growing", exit_code=process.returncode, why=why)
        await self.stop(nice=self.nice)


async def _follow(run_dir: RunDir) -> None:
    """Write the snapshots that the hub asks for, until it closes the input or is gone."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    ends: asyncio.Queue[int] = asyncio.Queue()

    async def read() -> None:
        async for line in lines:
            ends.put_nowait(int(line))

    async def write(writer: SnapshotWriter) -> None:
        while True:
            end = await ends.get()
            await writer.write(end)
            sys.stdout.write(f"{end}\n")
            sys.stdout.flush()

    with _writing(run_dir) as writer:
        await either(read(), write(writer))


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 once the hub is gone."""
    try:
        arm()
        collect_rarely()
        reuse_memory()
        asyncio.run(_follow(RunDir(Path(arguments[0]))))
    except AstraflowError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
