"""Snapshots are made by a process beside the hub, which may be too slow or fail."""

import asyncio
import sys

import pytest

from astraflow.dataflow.compaction import ended


async def _python(program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-S", "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("code", [0, 3])
async def test_process_that_ends_by_itself_is_waited_for(code: int) -> None:
    process = await _python(f"raise SystemExit({code})")
    assert await ended(process, is_late=lambda: False)
    assert process.returncode == code


async def test_process_that_is_late_is_killed() -> None:
    process = await _python("input()")
    assert not await ended(process, is_late=lambda: True)
    assert process.returncode == -9
