"""What every sandbox does, whatever it is made of."""

import asyncio

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.sandbox.channel import run_inside

KINDS = ("bubblewrap", "unsafe_process", "podman", "docker")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


async def test_a_command_says_how_it_ended(start, kind):
    sandbox = await start(kind)
    finished = await sandbox.exec(["sh", "-c", "cat; echo out; echo err >&2; exit 3"], stdin=b"in ")
    assert (finished.exit_code, finished.signal) == (3, None)
    assert (finished.stdout, finished.stderr) == (b"in out\n", b"err\n")
    assert not finished.is_well
    killed = await sandbox.exec(["sh", "-c", "kill -SEGV $$"])
    assert (killed.exit_code, killed.signal) == (None, 11)
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr


async def test_libraries_have_one_thread_unless_a_command_asks_for_more(start, kind):
    sandbox = await start(kind)
    show = ["sh", "-c", "echo $OMP_NUM_THREADS"]
    assert (await sandbox.exec(show)).stdout == b"1\n"
    assert (await sandbox.exec(show, env={"OMP_NUM_THREADS": "3"})).stdout == b"3\n"
    program = "import os; print(os.environ['OMP_NUM_THREADS'])"
    judged, _ = await sandbox.run({"do": "program", "source": program, "stdin": b""})
    assert judged.stdout == b"1\n"


async def test_files_are_written_and_read(start, kind):
    sandbox = await start(kind)
    data = bytes(range(256)) * 1000
    await sandbox.write("a/b/c", data)
    assert await sandbox.read("a/b/c") == data
    assert (await sandbox.exec(["wc", "-c"], stdin=data)).stdout == b"256000\n"
    there = await sandbox.exec(["sh", "-c", "wc -c < a/b/c; echo $X; pwd"], env={"X": "set"})
    assert there.stdout.split()[:2] == [b"256000", b"set"]
    assert (await sandbox.exec(["ls"], cwd="a/b")).stdout == b"c\n"
    with pytest.raises(FileNotFoundError, match="nothing"):
        await sandbox.read("nothing")
    with pytest.raises(FileNotFoundError, match="a/b"):
        await sandbox.read("a/b")
    with pytest.raises(OSError, match="b/c/d"):
        await sandbox.write("a/b/c/d", b"")


async def test_a_pipe_or_a_large_file_is_not_read(start, kind):
    sandbox = await start(kind, file_mb=1)
    await sandbox.exec(["sh", "-c", "mkfifo pipe; ln -s /dev/zero zero"])
    for name in ("pipe", "zero"):
        with pytest.raises(FileNotFoundError, match="no file"):
            await sandbox.read(name)
    filled = await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero > big"])
    assert not filled.is_well
    assert len(await sandbox.read("big")) <= 2**20


async def test_time_ends_a_command_and_all_that_it_started(start, kind):
    sandbox = await start(kind)
    finished = await sandbox.exec(
        ["sh", "-c", "trap '' TERM; echo began; (setsid sleep 500 &) ; sleep 500"], time_s=1.0
    )
    assert finished.is_timeout
    assert finished.signal == 9
    assert finished.stdout == b"began\n"
    assert b"sleep" not in (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout or (
        kind == "unsafe_process"
    )


async def test_what_is_printed_is_bounded(start, kind):
    sandbox = await start(kind, output_mb=0.01)
    finished = await sandbox.exec(["sh", "-c", "head -c 5000000 /dev/zero; echo done >&2"])
    assert finished.is_well
    assert finished.is_truncated
    assert len(finished.stdout) == int(0.01 * 2**20)
    assert finished.stderr == b"done\n"


async def test_memory_is_bounded(start, kind):
    sandbox = await start(kind, memory_mb=128)
    asked = {"do": "program", "source": "x = bytearray(2**30)", "stdin": b""}
    finished, _ = await run_inside(sandbox, asked, time_s=5.0)
    assert not finished.is_well
    asked["source"] = "print(2 ** 10)"
    assert (await run_inside(sandbox, asked, time_s=5.0))[0].stdout == b"1024\n"


async def test_one_sandbox_knows_nothing_of_another(start, kind):
    one, other = await start(kind), await start(kind)
    await one.write("mine", b"x")
    with pytest.raises(FileNotFoundError):
        await other.read("mine")


async def test_what_is_cancelled_is_ended(start, kind):
    sandbox = await start(kind)
    running = asyncio.ensure_future(sandbox.exec(["sleep", "500"]))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sandbox.close()
    await sandbox.close()


@pytest.mark.parametrize("name", ["bubblewrap", "unsafe_process", "podman", "docker", "e2b"])
def test_options_are_checked(name):
    with pytest.raises(AstraflowError, match="memory_gb") as caught:
        build_sandboxes(name, {"memory_gb": 1}, where="sandbox_options")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_sandbox_of_another_name_is_not_known():
    with pytest.raises(AstraflowError, match="did you mean bubblewrap"):
        build_sandboxes("bubblewarp", {}, where="sandbox_options")
