"""Compaction: a snapshot takes the place of old records, made by a process beside the hub."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from astraflow.dataflow.commits import Commits
from astraflow.storage.fault_points import FaultPoint, reach
from astraflow.storage.journal import Journal

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.5
_ERROR_NBYTES = 1000


async def compact_for_ever(
    commits: Commits, journal: Journal, *, run_dir: Path, every_nbytes: int
) -> None:
    """Let a snapshot take the place of records whenever so many bytes of them have come.

    A snapshot that fails costs nothing but room: the next attempt comes after as many bytes again.

    Raises:
        AstraflowError: JOURNAL_FAILED when the journal cannot be trimmed.
    """
    done_nbytes = 0
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if commits.nbytes - done_nbytes < every_nbytes:
            continue
        done_nbytes, end = commits.nbytes, journal.end
        if await _snapshot(run_dir, end):
            reach(FaultPoint.TRIM_STARTED)
            await journal.trim(end)
            log.info("journal compacted", first=journal.first, end=journal.end)


async def _snapshot(run_dir: Path, end: int) -> bool:
    """Have a snapshot made; return whether it is safe."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow.dataflow.compact", str(run_dir), str(end)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        why = errors.decode(errors="replace")[-_ERROR_NBYTES:]
        log.warning("journal: no snapshot; it keeps growing", exit_code=process.returncode, why=why)
    return not process.returncode
