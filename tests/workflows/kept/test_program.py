"""Programs that mean harm, and what is left of them."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from astraflow.workflows.kept import supervisor as keeper_module
from astraflow.workflows.kept.program import ExitCause, Program, ProgramLimits, environment

SMALL = ProgramLimits(time_s=20.0, memory_mb=512, processes=32)
ENV = {"PATH": os.environ["PATH"]}


async def fate_of(code, folder, limits=SMALL, **env):
    command = (sys.executable, "-I", "-S", "-c", code)
    program = await Program.start(command, limits=limits, folder=folder, env=ENV | env)
    return await program.wait()


def left_of(mark):
    """Return processes that carry a mark in their environment."""
    found = []
    for pid in psutil.pids():
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


async def until(claim):
    while not claim():  # noqa: ASYNC110 - other processes make it true
        await asyncio.sleep(0.01)


async def test_a_program_says_what_it_has_to_say(tmp_path):
    fate = await fate_of("import os; print('hi'); os._exit(3)", tmp_path)
    assert (fate.ended, fate.code) == (ExitCause.EXITED, 3)
    assert (await fate_of("print('hi')", tmp_path)).is_well
    assert (tmp_path / "stdout").read_text() == "hi\n"


@pytest.mark.slow
async def test_a_program_that_is_not_there_says_so(tmp_path):
    program = await Program.start(("no-such-agent",), limits=SMALL, folder=tmp_path, env=ENV)
    assert (await program.wait()).code == 127
    assert "no-such-agent" in (tmp_path / "stderr").read_text()


async def test_a_program_is_looked_for_beside_the_interpreter_at_last(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = (Path(sys.executable).name, "-c", "import sys; print(sys.prefix)")
    env = environment({})
    program = await Program.start(command, limits=SMALL, folder=tmp_path, env=env)
    assert (await program.wait()).is_well
    assert (tmp_path / "stdout").read_text().strip() == sys.prefix
    assert env["PATH"].startswith(f"{tmp_path}{os.pathsep}")


def test_children_are_found_where_the_kernel_lists_none():
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("there is nothing to compare with")
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"]) as shell:
        try:
            children = []
            while len(children) < 2:
                children = keeper_module._listed_children(shell.pid)
            found = keeper_module._children_by_parent()
            assert sorted(found[shell.pid]) == sorted(children)
            assert shell.pid in found[os.getpid()]
        finally:
            for pid in (*children, shell.pid):
                os.kill(pid, signal.SIGKILL)


ELSEWHERE = """
import ctypes, os, runpy, sys
sys.platform, ctypes.CDLL = "darwin", None
del os.sched_setscheduler
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
async def test_elsewhere_than_on_linux_the_programs_process_group_is_killed(tmp_path):
    """Without the calls that Linux alone has, as on a Mac."""

    async def fate_there(script, **limits):
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", ELSEWHERE, keeper_module.__file__),
            *(json.dumps(SMALL._replace(**limits)), str(tmp_path), "sh", "-c", script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said = json.loads(await keeper.stdout.read())
        await keeper.wait()
        return said

    assert await fate_there("echo hi; exit 3") == {"why": "exited", "code": 3}
    assert (tmp_path / "stdout").read_text() == "hi\n"
    late = await fate_there("echo $$; sleep 60 & echo $!; sleep 60", time_s=0.5)
    assert late == {"why": "time", "code": -1}
    pids = [int(each) for each in (tmp_path / "stdout").read_text().split()[1:]]
    assert len(pids) == 2
    await until(lambda: not any(map(is_alive, pids)))


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


HOSTILE = {
    "endless loop": (
        "while True: pass",
        ProgramLimits(time_s=0.3, memory_mb=512, processes=8),
        "time",
    ),
    "fork bomb": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        ProgramLimits(time_s=20.0, memory_mb=4096, processes=16),
        "processes",
    ),
    "fork bomb of sessions": (
        "import os\nwhile True:\n  try: os.fork() or os.setsid()\n  except OSError: pass",
        ProgramLimits(time_s=20.0, memory_mb=4096, processes=16),
        "processes",
    ),
    "many small thieves": (
        "import os, time\nfor _ in range(8): os.fork() or (bytearray(b'1' * 2**26), time.sleep(60))"
        "\nx = bytearray(b'1' * 2**26)\ntime.sleep(60)",
        ProgramLimits(time_s=20.0, memory_mb=200, processes=600),
        "memory",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_nothing_is_left_of_a_program_that_is_hostile(name, tmp_path):
    code, limits, why = HOSTILE[name]
    mark = f"MARK_{os.getpid()}_{name.replace(' ', '_')}"
    fate = await fate_of(code, tmp_path, limits, MARK=mark)
    assert (fate.ended, fate.code) == (ExitCause(why), -1)
    assert left_of(mark) == []


@pytest.mark.root
@pytest.mark.slow
async def test_root_has_a_bound_of_processes_without_a_control_group(tmp_path):
    """Where nothing can be made under /sys/fs/cgroup, and the kernel gives namespaces a pid_max."""
    bound = "print(open('/proc/sys/kernel/pid_max').read())"
    assert await without_control_groups(tmp_path, bound) == {"why": "exited", "code": 0}
    most = int((tmp_path / "stdout").read_text())
    if most > 16 * SMALL.processes + 64:
        pytest.skip("this kernel has one pid_max for all namespaces")
    mark = f"MARK_{os.getpid()}_root"
    bomb, _, _ = HOSTILE["fork bomb of sessions"]
    fate = await without_control_groups(tmp_path, bomb, MARK=mark)
    assert fate == {"why": "processes", "code": -1}
    assert left_of(mark) == []


async def without_control_groups(folder, code, **env):
    """Run the keeper where a read-only folder hides all control groups."""
    hide = 'mount -t tmpfs -o ro none /sys/fs/cgroup && exec "$@"'
    program = (sys.executable, "-I", "-S", "-c", code)
    told = (json.dumps(SMALL._replace(memory_mb=4096)), str(folder))
    keeper = (sys.executable, "-I", "-S", keeper_module.__file__, *told, *program)
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "sh", "-c", hide, "sh", *keeper),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENV | env,
    )
    # Its standard input stays open until it has ended: that it is closed means stop.
    said = await process.stdout.read()
    await process.communicate()
    if not said:
        pytest.skip("the machine lets nobody hide control groups")
    return json.loads(said)


THREADS = """
import os, threading, time
for _ in range(40): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os._exit(os.fork() and 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [True, False])
async def test_threads_do_not_count_as_processes_whoever_runs_them(is_alone):
    """Nor do those that the user has elsewhere, where he may have no namespace."""
    keeper, user = [sys.executable, "-I", "-S", "-c"], os.geteuid()
    if not user:
        keeper[0], user = next(filter(os.path.exists, ("/usr/bin/python3", sys.executable))), 12345
    source = inspect.getsource(keeper_module)
    if not is_alone:
        source = source.replace("libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID)", "True")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, user, -1)
        told = (json.dumps(SMALL._replace(processes=4)), folder)
        with busy(keeper, user):
            process = await asyncio.create_subprocess_exec(
                *(*keeper, source, *told, *keeper, THREADS),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                user=user,
            )
            said = await process.stdout.read()
            await process.communicate()
        errors = (Path(folder) / "stderr").read_text()
    assert json.loads(said) == {"why": "exited", "code": 0}, errors


@contextmanager
def busy(keeper, user):
    """Have a process of a user with many threads."""
    code = (
        "import threading, time\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(flush=True)"
    )
    command = [*keeper, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=user) as process:
        process.stdout.readline()
        yield
        process.kill()


@pytest.mark.slow
async def test_sixteen_gigabytes_are_not_had(tmp_path):
    code = "x = bytearray(16 * 2**30)"
    fate = await fate_of(code, tmp_path)
    assert (fate.ended, fate.code) == (ExitCause.EXITED, 1)
    assert "MemoryError" in (tmp_path / "stderr").read_text()


async def test_a_daemon_with_an_open_socket_does_not_outlive_its_program(tmp_path):
    code = (
        "import os, socket, time\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0: os.write(w, b'1'); time.sleep(600)\n"
        "  os._exit(0)\n"
        "os.read(r, 1); print(s.getsockname()[1])"
    )
    mark = f"MARK_{os.getpid()}_daemon"
    assert (await fate_of(code, tmp_path, MARK=mark)).is_well
    port = int((tmp_path / "stdout").read_text())
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert left_of(mark) == []


@pytest.mark.slow
async def test_a_program_goes_with_its_owner(tmp_path):
    """Cancelling stops it; so does the death of the process that started it."""
    mark = f"MARK_{os.getpid()}_owner"
    waiting = asyncio.create_task(fate_of("import time; time.sleep(600)", tmp_path, MARK=mark))
    await until(lambda: left_of(mark))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left_of(mark) == []
    assert tmp_path.exists()


@pytest.mark.slow
async def test_a_program_goes_when_its_owner_is_killed(tmp_path):
    mark, folder = f"MARK_{os.getpid()}_killed", tmp_path / "folder"
    folder.mkdir()
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(folder), mark), stdout=asyncio.subprocess.PIPE
    )
    await until(lambda: len(left_of(mark)) > 1)
    os.kill(owner.pid, signal.SIGKILL)
    await owner.communicate()
    await until(lambda: not left_of(mark) and not folder.exists())


OWNER = """
import asyncio, os, sys
from pathlib import Path
from astraflow.workflows.kept.program import Program, ProgramLimits
async def main():
    limits = ProgramLimits(time_s=None, memory_mb=512, processes=8)
    program = await Program.start(("sleep", "600"), limits=limits, folder=Path(sys.argv[1]),
        env={"PATH": os.environ["PATH"], "MARK": sys.argv[2]})
    await program.wait()
asyncio.run(main())
"""
