import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest

from astraflow.core.errors import BLOCKED_EXIT, Reason
from astraflow.raas.failures import LoopWatch


async def test_the_line_that_blocks_the_loop_is_reported():
    was_told, reports = threading.Event(), []

    def report(failure):
        reports.append(failure)
        was_told.set()

    watch = LoopWatch(report, ends_after_s=1000, blocked_s=0.1)
    watch.start()
    try:
        await asyncio.sleep(0)
        assert was_told.wait(60)  # blocks
    finally:
        watch.close()
    assert reports[0].reason is Reason.ENVIRONMENT_FAILED
    assert reports[0].cause.startswith("Blocked at test_loop_watch.py:")
    assert "# blocks" in reports[0].traceback
    assert "asyncio.to_thread" in reports[0].traceback


async def test_a_loop_that_goes_on_is_left_alone():
    reports = []
    watch = LoopWatch(reports.append, ends_after_s=1000, blocked_s=100)
    watch.start()
    await asyncio.sleep(1.1)
    watch.close()
    assert reports == []


@pytest.mark.slow
def test_a_process_that_never_goes_on_ends(tmp_path):
    code = """
    import asyncio
    from astraflow.raas.failures import LoopWatch

    def refuse(failure):
        raise OSError("nobody hears")

    async def main():
        LoopWatch(refuse, ends_after_s=0.4, blocked_s=0.2).start()
        await asyncio.sleep(0)
        while True:
            pass

    asyncio.run(main())
    """
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == BLOCKED_EXIT
    said = done.stdout + done.stderr
    assert 'endless.py", line 11, in main' in said or 'endless.py", line 12, in main' in said
    assert "nobody hears" in said
