"""The launcher of a run that cannot start, or whose cluster does not answer for a while."""

import asyncio
import json
import os
import socket
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe, load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.core.status import RunState, StopMode
from astraflow.launch import launcher as module
from astraflow.launch.executors.base import RunPlace
from astraflow.launch.executors.ssh import SshExecutor, SshOptions
from astraflow.launch.launcher import Launcher
from astraflow.launch.processes import RoleCommand
from astraflow.launch.status import RunProgress
from astraflow.rpc.concurrency import Backoff
from astraflow.testing import small_recipe


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Slurm's commands, which fail unless a script says otherwise."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(**scripts):
        for name in ("sbatch", "squeue", "scancel"):
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{scripts.get(name, 'echo it is away >&2; exit 1')}\n")
            path.chmod(0o700)

    write()
    return write


def on_slurm(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", changes={"executor.name": "slurm"})
    console = Console(file=StringIO(), width=1000)
    return Launcher(recipe=recipe, run_dir=RunDir(tmp_path / "run"), console=console)


def node(tmp_path):
    return RoleCommand(name="raas-1", arguments=("raas",), log=tmp_path / "run" / "raas-1.log")


SORT = Path(__file__).parents[2] / "recipes" / "sort.yaml"


def on_port(tmp_path, port):
    recipe, run_dir = load_recipe(SORT, [f"hub.listen=127.0.0.1:{port}"]), RunDir(tmp_path / "run")
    run_dir.root.mkdir(parents=True)
    run_dir.recipe.write_text(dump_recipe(recipe))
    console = Console(file=StringIO(), width=1000)
    return Launcher(recipe=recipe, run_dir=run_dir, console=console)


@pytest.mark.slow
async def test_where_the_hub_does_not_start_no_model_is_made(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, failure = await on_port(tmp_path, taken.getsockname()[1]).run()
    assert "did not start, it ended with exit code 1:" in failure
    assert "choose another port" in failure
    roles = [each.cmdline() for each in psutil.Process().children()]
    assert not [each for each in roles if "warm-up" in each]


def unread():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.slow
@pytest.mark.parametrize("opened", [unread, partial(Path("/dev/full").open, "w")])
def test_a_console_that_takes_nothing_ends_no_run(opened, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken, opened() as file:
        port = f"hub.listen=127.0.0.1:{taken.getsockname()[1]}"
        # One that is there: no process begins to make it.
        recipe = load_recipe(SORT, [port, f"policies.solver.model={{path: {tmp_path}}}"])
        summary = module.run_recipe(recipe, runs=tmp_path, console=Console(file=file))
    assert "choose another port" in summary.failure
    assert "choose another port" in RunDir(tmp_path / "sort").summary.read_text()
    assert capsys.readouterr().out.count("the console takes nothing more") == 1


@pytest.mark.slow
async def test_a_hub_that_takes_long_to_start_is_told_of_and_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_HUB_SLOW_S", 0.0)
    launcher = on_port(tmp_path, 0)
    launcher.say = launcher.console.print
    assert (await launcher._start_hub()).startswith("127.0.0.1:")
    assert launcher.console.file.getvalue().count("still reads its data sets") == 1
    await launcher._end_all()
    await launcher.executor.close()


@pytest.mark.slow
async def test_an_end_of_which_nothing_was_heard_is_as_the_hub_wrote_it_down(tmp_path):
    launcher = on_port(tmp_path, 0)
    await launcher._start_hub()
    (hub,) = launcher.processes
    async with ControlClient.of(launcher.run_dir, patience_s=0.1) as launcher.control:
        launcher.last = await launcher.control.get_run()
        await launcher.control.stop_run(StopMode.CANCEL)
        assert await hub.wait() == 0
        await launcher._show(RunProgress(launcher.console, launcher.recipe))
        assert launcher.last.state is RunState.DONE
        assert launcher.failure is None
        launcher.last = None
        with pytest.raises(AstraflowError, match="NOT_READY"):
            await launcher._show(RunProgress(launcher.console, launcher.recipe))
    await launcher.executor.close()


@pytest.mark.slow
async def test_a_node_that_has_not_joined_a_run_that_is_over_is_not_waited_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_END_S", 1000.0)
    launcher, stays = on_port(tmp_path / "a", 0), on_port(tmp_path / "b", 0)
    await launcher._start_hub()
    await stays._start_hub()
    # Any process that goes on for long, in a node's place.
    (late,) = stays.processes
    late.command = replace(late.command, name="raas-0")
    launcher.processes.append(late)
    async with ControlClient.of(launcher.run_dir, patience_s=5) as control:
        await control.stop_run(StopMode.CANCEL)
    await launcher._see_end()
    assert late.exit_code is not None
    await launcher.executor.close()
    await stays.executor.close()


async def test_a_process_that_died_is_started_again_once_its_cluster_answers(
    tmp_path, commands, monkeypatch
):
    monkeypatch.setattr(module, "_CLUSTER_BACKOFF", Backoff(limit_s=0.0))
    launcher, mark = on_slurm(tmp_path), tmp_path / "asked"
    commands(sbatch=f"[ -e {mark} ] && echo 7 && exit; touch {mark}; echo it is away >&2; exit 1")
    process = await launcher._start_again(node(tmp_path))
    assert launcher.processes == [process]
    assert process.job_id == 7
    assert launcher.console.file.getvalue().count("raas-1 is not started yet") == 1
    monkeypatch.setattr(module, "_CLUSTER_AWAY_S", -1.0)
    commands()
    with pytest.raises(AstraflowError, match="it is away"):
        await launcher._start_again(node(tmp_path))
    await launcher.executor.close()


async def test_a_job_that_is_being_submitted_is_there_for_the_sweep(tmp_path, commands):
    launcher, begun, go, done = on_slurm(tmp_path), *(tmp_path / name for name in "abc")
    os.mkfifo(go)
    commands(sbatch=f"touch {begun}; read line <{go}; touch {done}; echo 7")
    starting = asyncio.create_task(launcher.executor.start(node(tmp_path)))
    while not begun.exists():
        await asyncio.wait([starting], timeout=0.01)
    starting.cancel()
    with go.open("r+b", buffering=0) as line:
        line.write(b"go\n")
        await asyncio.wait([starting])
    assert done.exists()
    await launcher.executor.close()


async def test_what_may_be_left_on_a_cluster_that_does_not_answer_is_told(
    tmp_path, commands, monkeypatch
):
    launcher = on_slurm(tmp_path)
    commands(sbatch="echo 7")
    process = await launcher._start_again(node(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(module, "_END_S", 0.0)
    await launcher._end_all()
    assert process.exit_code is None
    told = launcher.console.file.getvalue()
    assert "may be left on the cluster: `scancel 7` cannot be started" in told
    assert "may be left on the cluster: `squeue --me" in told
    await launcher.executor.close()


async def test_jobs_that_slurm_does_not_cancel_are_told(tmp_path, commands):
    launcher = on_slurm(tmp_path)
    job = {"job_id": 7, "job_state": "RUNNING", "exit_code": 0}
    said = json.dumps({"jobs": [{**job, "comment": f"astraflow:{tmp_path / 'run'}"}]})
    commands(squeue=f"echo '{said}'", scancel="echo no right to it >&2; exit 1")
    with pytest.raises(AstraflowError, match=r"`scancel 7` ended with exit code 1: no right to it"):
        await launcher.executor.sweep()
    over = said.replace("RUNNING", "COMPLETED")
    mark = tmp_path / "cancelled"
    squeue = f"[ -e {mark} ] && echo '{over}' || echo '{said}'"
    commands(squeue=squeue, scancel=f"touch {mark}; exit 1")
    await launcher.executor.sweep()
    await launcher.executor.close()


async def test_checkpoints_that_do_not_come_back_from_a_host_are_told(tmp_path, monkeypatch):
    (tmp_path / "rsync").write_text("#!/bin/sh\necho connection refused >&2\nexit 255\n")
    (tmp_path / "rsync").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = []
    place = RunPlace(run_dir=RunDir(tmp_path), name="run", code=tmp_path, note=told.append)
    executor = SshExecutor(place, SshOptions(hosts=("gpu-1",)))
    executor._shares["gpu-1"] = False
    await executor.fetch(["gpu-1"])
    assert told == []
    await executor.fetch(["gpu-1"], trainer="trainer-solver")
    assert len(told) == 1
    assert "trainer-solver: its checkpoints stay on gpu-1" in told[0]
    assert "connection refused" in told[0]
