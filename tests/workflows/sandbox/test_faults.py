"""Whose failure it is: what a program did to its sandbox, and what was done to it from outside."""

import asyncio

import psutil
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.sandbox.channel import run_inside
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
