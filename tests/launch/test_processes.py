"""Role processes: no orphans, whatever happens to the launcher."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from astraflow.config.run_dir import RunDir
from astraflow.launch.processes import LIFELINE, LocalExecutor, RoleCommand, RoleProcess, Roles
from astraflow.rpc.access import HubTokens
from astraflow.testing import small_recipe


@pytest.fixture
async def executor():
    made = LocalExecutor()
    yield made
    await made.close()


async def test_output_goes_to_the_log_and_the_exit_code_is_told(tmp_path, executor):
    command = RoleCommand(name="version", arguments=("--version",), log=tmp_path / "logs" / "v.log")
    process = await executor.start(command)
    assert await process.wait() == 0
    assert "0." in process.last_words()


async def test_an_unknown_command_ends_with_its_usage_in_the_log(tmp_path, executor):
    command = RoleCommand(name="x", arguments=("no-such-command",), log=tmp_path / "x.log")
    process = await executor.start(command)
    assert await process.wait() == 2
    assert "no-such-command" in process.last_words()


async def test_a_file_with_the_name_of_a_module_of_python_hides_nothing_from_a_role(
    tmp_path, executor, monkeypatch
):
    (tmp_path / "random.py").write_text("raise SystemExit('not the random of Python')")
    monkeypatch.chdir(tmp_path)
    command = RoleCommand(name="version", arguments=("--version",), log=tmp_path / "v.log")
    process = await executor.start(command)
    assert await process.wait() == 0, process.last_words()


def test_code_of_the_working_directory_is_found_by_a_role(tmp_path):
    (tmp_path / "mine.py").write_text("number = 17")
    code = "from astraflow.core.code import load; print(load('mine:number', what='code'))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "17\n", done.stderr


async def test_a_line_of_any_length_is_heard_and_logged(tmp_path):
    command = RoleCommand(name="loud", arguments=(), log=tmp_path / "l.log")
    code = "print('x' * 200_000); print('done\\n\\nend', end='')"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    heard = []
    assert await RoleProcess(command, child, heard.append).wait() == 0
    assert heard == ["x" * 200_000, "done", "", "end"]
    assert command.log.read_text() == "x" * 200_000 + "\ndone\n\nend"


def test_a_node_that_follows_another_has_its_port_for_metrics(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"metrics.listen": "0.0.0.0:9400"})
    run_dir, tokens = RunDir(tmp_path), HubTokens.generate()
    roles = Roles(recipe=recipe, run_dir=run_dir, tokens=tokens, models={})
    first, third = roles.raas(1, "h:1"), roles.raas(3, "h:1", place=1)
    assert "metrics.listen=0.0.0.0:9403" in first.arguments
    assert "metrics.listen=0.0.0.0:9403" in third.arguments


LAUNCHER = """
    import os, subprocess, sys
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, NAME: str(read), "ASTRAFLOW_ORPHAN_SIGNAL": sys.argv[1]},
        pass_fds=(read,), start_new_session=True,
    )
    print(child.pid, flush=True)
    child.wait()
"""

CHILD = """
import signal, time
from astraflow.launch.processes import hold_lifeline
hold_lifeline()
print("holding", flush=True)
signal.sigwait({signal.SIGUSR1})
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_when_its_launcher_is_killed(number):
    code = f"CHILD = {CHILD!r}\nNAME = {LIFELINE!r}\n" + textwrap.dedent(LAUNCHER)
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(int(number))], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    assert launcher.stdout.readline() == "holding\n"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    gone, alive = psutil.wait_procs([child], timeout=100)
    launcher.stdout.close()
    assert (gone, alive) == ([child], [])


async def test_a_process_that_ignores_the_request_to_end_is_killed(tmp_path):
    command = RoleCommand(name="stubborn", arguments=(), log=tmp_path / "s.log")
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    code += "; time.sleep(600)"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    await child.stdout.readline()
    process = RoleProcess(command, child)
    await process.end(grace_s=0.05)
    assert process.exit_code == -signal.SIGKILL


async def test_what_a_process_leaves_behind_ends_with_it(tmp_path):
    # Not at the end of the run, when its number may be that of somebody else's processes.
    command = RoleCommand(name="leaver", arguments=(), log=tmp_path / "l.log")
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL).pid)"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    said = []
    assert await RoleProcess(command, child, said.append).wait() == 0
    left = [psutil.Process(int(each)) for each in said if psutil.pid_exists(int(each))]
    assert psutil.wait_procs(left, timeout=100)[1] == []
