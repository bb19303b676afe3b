"""Compaction: a snapshot takes the place of old records, made by a process beside the hub.

That process, `python -m astraflow.dataflow.compaction RUN_DIR END`, replays as many records as the
hub took, so it may need as much of a core. Where the hub needs its core itself it comes last, until
the journal has grown too far meanwhile.
"""

import asyncio
import math
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.commits import Commits
from astraflow.dataflow.journals import is_begun, open_journal, open_reader
from astraflow.dataflow.recovery import beginning_of, replay
from astraflow.storage.fault_points import FaultPoint, arm, hit
from astraflow.storage.journal import Journal
from astraflow.storage.lock import FileLock

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

POLL_S = 0.5

_ERROR_NBYTES = 1000

_IDLE = 19

# Attempts, one after the other: how far the process stands back, on the scale of `nice`, and how
# many times the bytes that begin one may come meanwhile. The first has what the hub leaves of its
# core, the last as much as the hub.
_ATTEMPTS = ((_IDLE, 1.0), (0, math.inf))
# A snapshot is begun when to replay what came since the last one takes so long: with what comes
# while it is made, and with the start of a process, a hub serves again within five seconds.
REPLAY_S = 1.0


async def write_snapshot_of(run_dir: RunDir, end: int) -> None:
    """Write the state that the records before position `end` come to.

    Raises:
        AstraflowError: JOURNAL_FAILED, also while another process writes one.
    """
    # One at a time, also when a hub that died left one behind: positions only rise.
    lock = FileLock.take(run_dir.snapshot.with_suffix(".lock"))
    try:
        recipe = load_recipe(run_dir.recipe, ())
        with open_reader(recipe, run_dir) as (reader, snapshot):
            replica = await replay(reader, snapshot, beginning_of(recipe), end=end)
            if replica is not None:
                hit(FaultPoint.COMPACTION_REPLAYED)
                replica.save(snapshot, identity=reader.identity)
                hit(FaultPoint.SNAPSHOT_PLACED)
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
    done = 0.0

    def amount() -> float:
        return max(commits.nbytes / every_nbytes, replay_s() / REPLAY_S)

    while True:
        await asyncio.sleep(POLL_S)
        if amount() - done < 1.0:
            continue
        done = amount()
        end = await _snapshot(journal, amount, run_dir=run_dir)
        if end is not None:
            hit(FaultPoint.TRIM_STARTED)
            # As much will come again: pages would be moved about for nothing.
            await journal.trim(end, spare_nbytes=every_nbytes)
            log.info("journal compacted", first=journal.first, end=journal.end)


async def _snapshot(journal: Journal, amount: Callable[[], float], *, run_dir: Path) -> int | None:
    """Have a snapshot made; return the position that it goes to, None when it failed."""
    for nice, times in _ATTEMPTS:
        end = journal.end
        is_late = partial(_is_past, amount, amount() + times)
        process = await _start(run_dir, end, nice)
        if await ended(process, is_late=is_late):
            return None if process.returncode else end
        log.info("journal: the snapshot finds no core; the next one stands back less", nice=nice)
    return None


def _is_past(amount: Callable[[], float], limit: float) -> bool:
    return amount() > limit


async def _start(run_dir: Path, end: int, nice: int) -> Process:
    command = (sys.executable, "-m", "astraflow.dataflow.compaction", str(run_dir), str(end))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    # From here, since its imports alone would keep the hub from its core for half a second.
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        if nice == _IDLE and hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    return process


async def ended(process: Process, *, is_late: Callable[[], bool]) -> bool:
    """Wait for a process that makes a snapshot; return whether it ended by itself.

    Args:
        process: Killed when it is late, or when the caller is cancelled.
        is_late: Asked every so often.
    """
    told = asyncio.ensure_future(process.communicate())
    try:
        while not told.done():
            if is_late():
                return False
            await asyncio.wait([told], timeout=POLL_S)
        _complain(process, (await told)[1])
        return True
    finally:
        await _stop(process, told)


async def _stop(process: Process, told: "asyncio.Future[tuple[bytes, bytes]]") -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    told.cancel()


def _complain(process: Process, errors: bytes) -> None:
    if process.returncode:
        why = errors.decode(errors="replace")[-_ERROR_NBYTES:]
        log.warning("journal: no snapshot; it keeps growing", exit_code=process.returncode, why=why)


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 once the snapshot is safe."""
    try:
        arm()
        asyncio.run(write_snapshot_of(RunDir(Path(arguments[0])), int(arguments[1])))
    except AstraflowError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
