"""`python -m astraflow.dataflow.compact RUN_DIR END`: writes the snapshot of a journal's beginning.

A process of its own, so that a hub never stops for it; it only reads the journal.
"""

import asyncio
import sys
from pathlib import Path

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.dataflow.recovery import beginning_of, replay
from astraflow.storage.fault_points import FaultPoint, arm, reach
from astraflow.storage.lock import FileLock
from astraflow.storage.reader import JournalReader


async def write_snapshot_of(run_dir: RunDir, end: int) -> None:
    """Write the state that the records before position `end` come to.

    Raises:
        AstraflowError: JOURNAL_FAILED, also while another process writes one.
    """
    # One at a time, also when a hub that died left one behind: positions only rise.
    lock = FileLock.take(run_dir.snapshot.with_suffix(".lock"))
    reader = JournalReader(run_dir.journal)
    try:
        begin = beginning_of(load_recipe(run_dir.recipe, ()))
        replica = await replay(reader, run_dir.snapshot, begin, end=end)
        if replica is not None:
            reach(FaultPoint.COMPACTION_REPLAYED)
            replica.save(run_dir.snapshot)
            reach(FaultPoint.SNAPSHOT_PLACED)
    finally:
        reader.close()
        lock.release()


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
