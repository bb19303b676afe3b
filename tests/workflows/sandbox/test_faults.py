"""Whose failure it is: what a program did to its sandbox, and what was done to it from outside."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from structlog.testing import capture_logs

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.sandbox.channel import GUEST, GuestPlace, GuestSandbox, run_inside
from astraflow.workflows.sandbox.protocol import Finished, SandboxLimits


async def test_a_program_that_ends_its_sandbox_is_at_fault(start):
    """Only where no namespace protects the guest."""
    sandbox = await start("unsafe_process")
    done = await sandbox.exec(["sh", "-c", "kill -9 $PPID"])
    assert done.is_lost
    assert not done.is_well
    with pytest.raises(PolicyFault, match="the sandbox has ended"):
        await sandbox.exec(["true"])
    with pytest.raises(PolicyFault):
        await sandbox.read("x")
    with pytest.raises(PolicyFault):
        await sandbox.write("x", b"")


# As gVisor's, and as a Mac's, where none of Linux's own calls is made.
POORER = {
    "gVisor": "os.pidfd_open, guest._below = refuse, guest._below_by_parents",
    "Mac": "os.pidfd_open, guest._IS_LINUX = refuse, False",
}


@asynccontextmanager
async def guest_in(folder, changes):
    """Start a guest outside of any sandbox, with something in it changed before it serves."""
    code = f"""
import os, sys
sys.path.insert(0, {str(GUEST.parent)!r})
import guest
def refuse(*_): raise OSError(38, "Function not implemented")
{changes}
guest.main()
"""
    place = GuestPlace(home=str(folder), task_count=4096, is_seen=True, is_namespace=False)
    command = (sys.executable, "-I", "-S", "-c", code)
    sandbox = await GuestSandbox.start(command, limits=SandboxLimits(), place=place, env={})
    try:
        yield sandbox
    finally:
        await sandbox.close()


@pytest.mark.parametrize("kernel", POORER)
async def test_a_kernel_that_lists_no_children_and_has_no_pidfd_will_do(kernel, tmp_path):
    async with guest_in(tmp_path, POORER[kernel]) as sandbox:
        finished = await sandbox.exec(["/bin/sh", "-c", "echo out; exit 3"])
        assert (finished.exit_code, finished.stdout) == (3, b"out\n")
        late = await sandbox.exec(["/bin/sh", "-c", "sleep 60 & echo $!; sleep 60"], time_s=0.5)
        assert late.is_timeout
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(int(late.stdout)).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - it makes itself true
                await asyncio.sleep(0.01)


async def test_a_guest_that_fails_is_told_with_its_traceback(tmp_path):
    with capture_logs() as logs:
        async with guest_in(tmp_path, "guest._child = refuse") as sandbox:
            assert (await sandbox.exec(["true"])).is_lost
    (told,) = logs
    assert told["log_level"] == "warning"
    assert "Function not implemented" in told["said"]


@pytest.mark.slow
async def test_too_much_memory_of_all_together_is_the_programs_fault(start):
    sandbox = await start(memory_mb=128)
    # Each alone is within the limit, the interpreter included.
    take = "x = bytearray(60 * 2**20); x[::4096] = b'1' * 15360; import time; time.sleep(60)"
    done = await sandbox.exec(
        ["sh", "-c", f'for i in 1 2 3 4; do python3 -c "{take}" & done; wait']
    )
    assert done.is_lost
    assert done.is_out_of_memory
    with pytest.raises(PolicyFault, match="took too much memory"):
        await sandbox.exec(["true"])


def sleepers(seconds):
    running = psutil.process_iter(["cmdline"])
    return [each for each in running if each.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe_process"])
async def test_nothing_of_a_command_that_is_withdrawn_is_left(start, kind):
    sandbox = await start(kind)
    seconds = f"{os.getpid()}.125"
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", f"sleep {seconds} & wait"]))
    while not sleepers(seconds):  # noqa: ASYNC110 - another process makes it true
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sandbox.close()
    with suppress(psutil.NoSuchProcess):
        assert all(each.status() == psutil.STATUS_ZOMBIE for each in sleepers(seconds))


@pytest.mark.slow
async def test_too_much_memory_is_given_back_where_no_namespace_ends(start):
    sandbox = await start("unsafe_process", memory_mb=128)
    seconds = f"{os.getpid()}.25"
    take = "x = b'1' * (90 * 2**20); import time; time.sleep(60)"
    command = f'sleep {seconds} & for i in 1 2 3; do python3 -c "{take}" & done; wait'
    assert (await sandbox.exec(["sh", "-c", command])).is_out_of_memory
    await sandbox.close()
    assert not sleepers(seconds)


async def test_a_sandbox_that_is_killed_from_outside_is_nobodys_fault(start):
    sandbox = await start()
    running = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
    below = psutil.Process(sandbox._process.pid)
    while len(below.children(recursive=True)) < 2:  # noqa: ASYNC110 - other processes make it true
        await asyncio.sleep(0.01)
    below.kill()
    with pytest.raises(AstraflowError, match="killed from outside by signal 9") as caught:
        await running
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED
    assert caught.value.retryable


class Babbler:
    """A sandbox of somebody's own, in which something else answers in place of the guest."""

    limits = SandboxLimits()

    async def exec(self, *_args, **_kwargs):
        parts = b"time", b"no code"
        header = [len(parts), *map(len, parts)]
        answer = b"".join([*(each.to_bytes(4, "little") for each in header), *parts])
        return Finished(exit_code=0, stdout=2 * answer)


async def test_an_answer_of_no_guest_is_told_and_no_fault_of_the_policy():
    with pytest.raises(ValueError, match="unpack"):
        await run_inside(Babbler(), {"do": "program"}, time_s=1.0)
